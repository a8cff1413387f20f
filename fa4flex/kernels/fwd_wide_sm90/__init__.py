"""Hopper forward kernel for heads wider than one product makes columns of the output."""
