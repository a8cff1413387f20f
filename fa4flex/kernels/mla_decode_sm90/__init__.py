"""Hopper forward kernel for few queries over latent rows, of which values are the first columns."""
