"""Cost of the machinery, around forwards and between them."""
