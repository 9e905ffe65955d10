"""Tests of draft models with a tokenizer of their own."""
