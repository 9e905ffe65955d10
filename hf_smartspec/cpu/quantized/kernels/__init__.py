"""Compiled with numba: tokens to int8, and their products with weights. They know one another and `jit` alone."""
