"""`smartspec bench generate`."""
