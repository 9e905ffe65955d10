"""`smartspec bench sources`."""
