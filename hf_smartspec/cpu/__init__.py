"""Compiled code for CPUs, run by torch's own threads: products of a few tokens, which torch's libraries are slow at."""
