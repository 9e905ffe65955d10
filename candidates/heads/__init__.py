"""Drafters that were trained for one target and look at its hidden states."""
