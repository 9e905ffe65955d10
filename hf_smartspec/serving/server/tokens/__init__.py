"""Tokens of answers: processors, decoding to text up to stop strings, and scoring of known texts."""
