"""Preparation: turns the arguments of a `generate` call into a call of the decoding loop."""
