"""`smartspec serve`."""
