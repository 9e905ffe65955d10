"""Compiled with numba: products of a few tokens. They know one another and `jit` alone."""
