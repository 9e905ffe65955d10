"""Compiled loops over the scores of whole vocabularies."""
