"""`smartspec bench queue`."""
