"""`smartspec bench replicas`."""
