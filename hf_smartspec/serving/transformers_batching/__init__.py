"""transformers' own continuous batching, served by the engine."""
