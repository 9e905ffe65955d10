"""Side-by-side measurements and checks that users can run on their own models."""
