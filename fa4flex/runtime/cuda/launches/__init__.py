"""Launches in which only pointers are missing, and the memory of their results."""
