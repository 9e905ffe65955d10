"""`python -m benchmarks online`."""
