"""`python -m benchmarks rollouts`."""
