"""`smartspec bench memory`."""
