"""Lengths of a ragged batch before its kernels run: made safe, and its tiles of queries sorted by work."""
