"""Derivatives of other kinds than a backward pass: forward mode, second derivatives and transforms of
torch.func.

They are made of PyTorch operations, on any device, one block of queries after another (parts.py): the memory
is that of a block beside inputs and results, in each derivative of a derivative."""

from fa4flex.runtime.derived.calls import attend, second_derivatives

__all__ = ["attend", "second_derivatives"]
