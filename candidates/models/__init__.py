"""Sources that run a language model, or the first layers of the target, to draft."""
