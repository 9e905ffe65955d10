"""What a server lets in: keys and their tenants, sizes, lengths of queues."""
