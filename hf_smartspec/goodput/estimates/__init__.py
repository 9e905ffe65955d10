"""Estimates from what was observed, in which old observations count less."""
