"""`smartspec bench online`."""
