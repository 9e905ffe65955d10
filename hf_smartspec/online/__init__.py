"""Drafters that learn from what they are asked to draft for (Online Speculative Decoding)."""
