"""`smartspec bench batch`."""
