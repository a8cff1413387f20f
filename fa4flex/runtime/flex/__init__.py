"""Variants through torch's flex_attention: on GPUs without generated kernels, and where it is asked for."""
