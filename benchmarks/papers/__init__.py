"""`python -m benchmarks papers`."""
