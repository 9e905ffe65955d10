"""`smartspec profile`."""
