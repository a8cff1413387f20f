"""Queries, keys and values of 16 bits to codes of 8 bits."""
