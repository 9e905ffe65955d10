"""Benches of one decoding step: what the library adds to a forward."""
