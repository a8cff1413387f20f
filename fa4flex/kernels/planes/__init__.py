"""Masses of tiles of keys, by a plane of 8 bits."""
