"""Measure the library on a GPU: exactness, and time against the bandwidth and against transformers' own."""
