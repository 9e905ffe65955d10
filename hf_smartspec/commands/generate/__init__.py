"""`smartspec generate`."""
