"""`smartspec bench simulate`."""
