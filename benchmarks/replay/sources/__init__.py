"""`python -m benchmarks sources`."""
