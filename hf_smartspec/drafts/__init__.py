"""Draft trees: the tokens that candidate sources propose and the target verifies. Plain numpy, no torch."""
