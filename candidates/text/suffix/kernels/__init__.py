"""The compiled code of suffix trees."""
