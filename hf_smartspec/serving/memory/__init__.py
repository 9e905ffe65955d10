"""Memory of an engine's requests: keys and values, caches of rows, encoder outputs."""
