"""`python -m benchmarks memory`."""
