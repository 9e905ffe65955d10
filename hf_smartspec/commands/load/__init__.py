"""`smartspec bench load` and `python -m benchmarks timeline`."""
