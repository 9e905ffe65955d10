"""What answers each route, whole or in events."""
