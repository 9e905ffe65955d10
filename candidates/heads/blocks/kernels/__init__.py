"""Compiled loops over the nodes of a block's trees."""
