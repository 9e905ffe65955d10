"""transformers' serving application, served by engines: continuous batching and speculative decoding over HTTP."""
