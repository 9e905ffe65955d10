"""What an engine keeps of its requests: keys and values, rows of caches, what encoders have read."""
