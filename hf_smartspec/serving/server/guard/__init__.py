"""Admission to a server: API keys and their tenants, sizes of bodies, lengths of queues."""
