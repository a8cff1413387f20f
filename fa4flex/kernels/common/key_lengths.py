"""Lengths of sequences whose keys a loader finds, as kernels take them."""

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, cute

from fa4flex.kernels.common.arguments import Arguments
from fa4flex.kernels.common.faults import report


def capacity(arguments: Arguments) -> Int64:
    """Number of keys that a sequence can have at most."""
    assert arguments.loader is not None
    return arguments.loader.capacity(arguments)


@cute.jit
def used_length(arguments: Arguments, b: Int32) -> Int32:
    """Keys of a sequence: what was given, but no fewer than none, and no more than it can have."""
    return possible(Int64(arguments.used_keys[b]), capacity(arguments))


def lengths_of(arguments: Arguments, b: Int32) -> tuple[Int32, Int32]:
    """Queries and keys of sequence b of a batch that is not packed."""
    q_len, kv_len = Int32(arguments.q.shape[1]), Int32(arguments.k.shape[1])
    if arguments.loader is not None:
        kv_len = used_length(arguments, b)
    if arguments.seqused_q is not None:
        q_len = Int32(arguments.seqused_q[b])
    if arguments.seqused_k is not None:
        kv_len = Int32(arguments.seqused_k[b])
    return q_len, kv_len


def possible(given: Int64, most: Int64) -> Int32:
    """A given number of keys, or the nearest to it from none to the most."""
    return Int32(cutlass.min(cutlass.max(given, Int64(0)), most))


@cute.jit
def check_length(arguments: Arguments, b: Int32) -> None:
    """Tell of a length that is not possible. Threads that tell of the same one say the same."""
    given, most = Int64(arguments.used_keys[b]), capacity(arguments)
    if given < 0:
        report(arguments.faults, "used_keys negative", (given,))
    if given > most:
        report(arguments.faults, "used_keys beyond", (given, most))
