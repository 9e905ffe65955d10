"""Kernels compiled with numba: operators on a few tokens. They import one another and `jit` alone."""
