"""Blackwell backward of heads up to 256: a kernel for dV, and one for dK and dQ."""
