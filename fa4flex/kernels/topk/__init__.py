"""Kernels that select the k largest scores of each row: a warp has a short row, a block a long one."""
