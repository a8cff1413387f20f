"""Blackwell backward by pairs of CTAs: one file per warp role."""
