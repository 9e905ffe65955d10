"""`smartspec bench timeline`."""
