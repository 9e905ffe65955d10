"""Code that the benches share."""
