"""Compiled code for GPUs, by Triton: operators on a few tokens, which torch's libraries are slow at."""
