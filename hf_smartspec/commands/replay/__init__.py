"""`smartspec replay`."""
