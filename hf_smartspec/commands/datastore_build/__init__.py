"""`smartspec datastore build`."""
