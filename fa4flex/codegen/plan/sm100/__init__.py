"""Plans of Blackwell kernels."""
