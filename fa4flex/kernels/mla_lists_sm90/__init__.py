"""Hopper forward kernel for listed latent rows, which are gathered one by one."""
