"""Attention of packed rows and draft trees: masked, compiled, shared prefixes, variable lengths on CUDA."""
