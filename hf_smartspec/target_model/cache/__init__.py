"""Key/value memory: slots of the packed forward, and the footprint of transformers' own caches."""
