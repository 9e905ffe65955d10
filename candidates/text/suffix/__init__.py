"""Suffix trees over a request's own text and earlier outputs (SuffixDecoding)."""
