"""`smartspec train`."""
