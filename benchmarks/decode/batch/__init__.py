"""`python -m benchmarks batch`."""
