"""Plans of Hopper kernels."""
