"""Queries, keys and values in 8 and 4 bits: rounding, scales, and what codes stand for."""
