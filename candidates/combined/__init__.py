"""Sources made of other sources: several as one, one of several, wrapped, tuned."""
