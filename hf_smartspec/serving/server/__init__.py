"""transformers' serving application, with engines behind it: continuous batching and speculative decoding over HTTP."""
