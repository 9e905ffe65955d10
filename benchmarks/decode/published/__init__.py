"""`python -m benchmarks published`."""
