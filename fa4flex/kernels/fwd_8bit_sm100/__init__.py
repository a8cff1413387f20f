"""Blackwell forward kernel of quantised queries, keys and values: products of 8 bits."""
