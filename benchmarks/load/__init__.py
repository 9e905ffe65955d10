"""Benches of serving: latency and goodput while requests arrive."""
