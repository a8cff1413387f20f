"""Blackwell forward kernel for few query rows: blocks split the keys, heads of a group share a tile."""
