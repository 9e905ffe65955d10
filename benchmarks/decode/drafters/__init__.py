"""`python -m benchmarks drafters`."""
