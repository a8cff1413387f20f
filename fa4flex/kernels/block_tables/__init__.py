"""Kernels that find the tiles of a mask: before a forward or backward kernel reads them from block tables."""
