"""`smartspec verify`."""
