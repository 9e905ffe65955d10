"""`smartspec bench tenants`."""
