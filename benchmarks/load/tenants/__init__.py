"""`python -m benchmarks tenants`."""
