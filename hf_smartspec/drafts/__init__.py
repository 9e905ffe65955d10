"""Draft trees: what every candidate source proposes and the target verifies. Plain numpy, no torch."""
