"""Queries, keys and values in 8 and 4 bits: how they are rounded, where their scales belong, what they stand for."""
