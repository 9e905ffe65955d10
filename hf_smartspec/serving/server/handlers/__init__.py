"""Handlers of the routes: they answer as a whole or in events."""
