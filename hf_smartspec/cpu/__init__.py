"""Compiled code for CPUs, run by torch's threads: operators on a few tokens, which torch's libraries are slow at."""
