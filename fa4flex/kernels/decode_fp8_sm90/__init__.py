"""Hopper forward kernel for few query rows over an e4m3 cache, dequantised in registers on the way to the
tensor cores."""
