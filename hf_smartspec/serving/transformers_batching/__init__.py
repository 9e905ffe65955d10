"""transformers' interface of continuous batching, served by an engine."""
