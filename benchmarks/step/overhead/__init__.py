"""What the machinery costs by itself: around forwards, and between them."""
