"""Benches of decoding: seconds and steps per token."""
