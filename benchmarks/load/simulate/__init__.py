"""`python -m benchmarks simulate`."""
