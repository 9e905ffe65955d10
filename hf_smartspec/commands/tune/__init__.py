"""`smartspec tune`."""
