"""`python -m benchmarks replicas`."""
