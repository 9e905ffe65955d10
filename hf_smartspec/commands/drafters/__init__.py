"""`smartspec bench drafters`."""
