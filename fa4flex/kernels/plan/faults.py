"""Faults that kernels find in contents of tensors, and their words: a call is over before anybody can read
them, so kernels correct what they find, and leave the kind and some numbers in a table.

The table is int64 [ROWS, WORDS]. Row 0 has a 1 in front if any other row has one; row 1 + kind has a 1, then
up to three numbers for the message.
"""

from __future__ import annotations

from dataclasses import dataclass

WORDS = 4
"""Numbers of a row: whether there is a fault, and three for its message."""


@dataclass(frozen=True)
class Kind:
    """One kind of fault. `given`, `expected` and `fix` are the parts of an error's message, where {0}, {1}
    and {2} stand for the numbers that the kernel left."""

    name: str
    given: str
    expected: str
    fix: str


def _of_side(side: str) -> tuple[Kind, ...]:
    """Faults of the lengths of queries, "q", or of keys, "k": those that make others come first."""
    cu, used = f"cu_seqlens_{side}", f"seqused_{side}"
    at_end = {
        "q": "slice the tensor, or pass seqused for sequences with unused tail tokens",
        "k": "slice the tensor, or pass cu_seqlens_k where keys are packed differently from queries",
    }
    return (
        Kind(
            f"{cu} starts",
            f"{cu} starts at {{0}}",
            "0 first",
            "prepend 0 to the cumulative sum of lengths",
        ),
        Kind(
            f"{cu} decreases",
            f"{cu} decreases after entry {{0}}: {{1}} to {{2}}",
            "a non-decreasing sequence",
            "pass cumulative lengths, not lengths: F.pad(lengths.cumsum(0), (1, 0))",
        ),
        Kind(
            f"{cu} ends",
            f"{cu} ends at {{0}}, {side} has {{1}} tokens",
            "the last entry equal to the number of packed tokens",
            at_end[side],
        ),
        Kind(f"{used} negative", f"{used} of {{0}}", "lengths >= 0", "use 0 for an empty sequence"),
        Kind(
            f"{used} beyond",
            f"{used}[{{0}}] = {{1}}, sequence {{0}} has {{2}} tokens",
            "at most the sequence's length",
            f"check {used} against cu_seqlens",
        ),
        Kind(
            f"{used} beyond padded",
            f"{used} up to {{0}} for a length of {{1}}",
            "at most {1}",
            "check the batch",
        ),
    )


_OF_PAGES = (
    Kind("used_keys negative", "seqused_k of {0}", "lengths >= 0", "use 0 for an empty sequence"),
    Kind(
        "used_keys beyond",
        "seqused_k of {0} tokens",
        "at most max_pages * page_size = {1}",
        "give the page table more columns",
    ),
    Kind(
        "page missing",
        "page {0} in the page table",
        "0 up to the number of pages, {1}",
        "only entries behind a sequence's last page may hold anything",
    ),
)

_OF_APPENDING = (
    Kind(
        "append beyond",
        "seqused_k of {0} and {1} tokens to append",
        "at most max_pages * page_size = {2} tokens together",
        "give the page table more columns",
    ),
    Kind("rotary beyond", "position {0}", "one of the {1} rows of cos and sin", "make these tables longer"),
    Kind(
        "rotary axis",
        "axis {0} of an angle",
        "0 up to the number of axes that positions have, {1}",
        "pass positions [axes, ...] with a row for each axis of rotary",
    ),
)

_OF_LISTS = (
    Kind(
        "block count",
        "{0} blocks in a row of a block map's lists",
        "0 to {1}: as many as the row has entries",
        "give indices room for the longest row",
    ),
    Kind(
        "block beyond",
        "key block {0} in a block map's lists",
        "0 to {1}: kv_len has no other blocks",
        "check block_size and kv_len; indices count blocks, not tokens",
    ),
    Kind(
        "block repeated",
        "a key block more than once in row {2} of a block map's lists (batch {0}, head {1})",
        "each block once, partial or full",
        "remove the duplicates, e.g. with torch.unique per row",
    ),
)

KINDS: tuple[Kind, ...] = (*_of_side("q"), *_of_side("k"), *_OF_PAGES, *_OF_APPENDING, *_OF_LISTS)
"""All kinds, in the order in which they are told where there are several. Kernels know them by position."""

ROWS = 1 + len(KINDS)
PLACES = {kind.name: place for place, kind in enumerate(KINDS)}
