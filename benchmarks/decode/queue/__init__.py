"""`python -m benchmarks queue`."""
