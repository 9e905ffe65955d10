"""`smartspec bench load` and `smartspec bench timeline`."""
