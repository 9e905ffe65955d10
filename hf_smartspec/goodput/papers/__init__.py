"""The papers' own length policies and formulas, for comparison with the auction."""
