"""
Kernels compiled with numba: tokens to int8, and their products with weights. They import one another and `jit` alone.
"""
