"""Rows for blocks of neighbouring tokens: means, sums, or greatest or least numbers of each channel."""
