"""`python -m benchmarks timeline`."""
