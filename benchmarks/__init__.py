"""The project's measurements: `python -m benchmarks NAME` in a checkout. They are not installed."""
