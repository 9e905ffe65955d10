"""Requests: from a body to arguments of `generate`, by way of fields, settings and forms of answers."""
