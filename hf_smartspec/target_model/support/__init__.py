"""What a model supports, found by its architecture, by probes, and by what was done to it."""
