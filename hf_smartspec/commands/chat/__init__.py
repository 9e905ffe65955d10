"""`smartspec chat`."""
