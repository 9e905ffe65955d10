"""`python -m benchmarks batching`: transformers' continuous batching by itself, and with an engine in its place."""
