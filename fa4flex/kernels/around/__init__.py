"""Small kernels around the large ones."""
