"""NVIDIA GPUs: compile and keep kernels, and launch them on torch tensors."""
