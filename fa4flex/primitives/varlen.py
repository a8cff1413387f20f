"""Ragged sequences: packed tokens with cumulative lengths, or padded batches with used lengths.

Under varlen every index that a mod sees, and `q_len` / `kv_len`, are per sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fa4flex.contents import Alike, checked_here, on_host
from fa4flex.errors import InputError
from fa4flex.exact import is_count
from fa4flex.primitives.base import check_integers, show

Bounds = tuple[int, int, int, int]


@dataclass(frozen=True, eq=False, repr=False)
class Varlen:
    """N sequences, by 1-D int32 or int64 tensors as FlashAttention takes them.

    cu_seqlens_q [N + 1]   where each sequence starts in the packed queries; the last entry is their number
    cu_seqlens_k [N + 1]   the same for keys; None means the same sequences as the queries
    seqused_q, seqused_k [N]   tokens of each sequence that take part, at most its length; the rest is padding
    max_seqlen_q, max_seqlen_k   upper bounds on the lengths, checked; None means computed

    Without cu_seqlens the batch is padded: q [N, ...] and k [N, ...] of one length, of which the first
    `seqused` tokens take part. Raises InputError for anything inconsistent.
    """

    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None

    def __post_init__(self) -> None:
        value = self._tensors()
        if not value:
            raise InputError(
                "Varlen() without lengths", "cu_seqlens_q, or seqused_k", "leave varlen= out if dense"
            )
        if self.cu_seqlens_q is None and self.cu_seqlens_k is not None:
            raise InputError(
                "cu_seqlens_k without cu_seqlens_q", "both, or cu_seqlens_q alone", "pass cu_seqlens_q too"
            )
        for name, tensor in value.items():
            _check_vector(name, tensor)
        if len(value) > 1:
            _check_alike(value)
        # Under torch.compile there is no data; whoever computes checks it. On a device, kernels do.
        if not torch.compiler.is_compiling() and self.checked:
            self._check_contents_again()

    @property
    def checked(self) -> bool:
        """True if the host checks contents. On a device, kernels set an error flag, and the next call raises;
        max_seqlen_q and max_seqlen_k, which no kernel reads, are not checked then."""
        return all(map(checked_here, self._tensors().values()))

    def check_contents(self) -> None:
        """Raise InputError for lengths that contradict each other, or themselves."""
        here = {name: on_host(tensor) for name, tensor in self._tensors().items()}
        for name, tensor in here.items():
            _check_values(name, tensor)
        cu_q = here.get("cu_seqlens_q")
        for side, cu in (("q", cu_q), ("k", here.get("cu_seqlens_k", cu_q))):
            used = here.get(f"seqused_{side}")
            _check_used(f"seqused_{side}", used, cu)
            self._check_max(f"max_seqlen_{side}", getattr(self, f"max_seqlen_{side}"), cu, used)

    def _check_contents_again(self) -> None:
        """`check_contents`, unless lengths with these contents were found to be right: they may have been
        written to since this object was made."""
        value = self._tensors()
        key = tuple(value), self.max_seqlen_q, self.max_seqlen_k
        _right.made(key, list(value.values()), self.check_contents)

    @property
    def packed(self) -> bool:
        """True if tokens are packed (cu_seqlens) rather than padded (seqused alone)."""
        return self.cu_seqlens_q is not None

    @property
    def cu_k(self) -> Tensor | None:
        """Cumulative key lengths, by default those of the queries."""
        return self.cu_seqlens_q if self.cu_seqlens_k is None else self.cu_seqlens_k

    @property
    def sequences(self) -> int:
        """N, the number of sequences."""
        name, tensor = next(iter(self._tensors().items()))
        return tensor.numel() - name.startswith("cu_")

    def check(self, q_tokens: int, k_tokens: int | None = None) -> None:
        """Raise InputError unless packed tensors of these lengths fit (k_tokens None: keys are paged)."""
        for cu in (self.cu_seqlens_q, self.cu_k):
            if cu is None:
                raise InputError(
                    "packed tensors with a Varlen that has only seqused",
                    "cu_seqlens_q",
                    "pass cu_seqlens_q [N + 1]",
                )
        if self.checked:
            self._check_contents_again()
            self.check_tokens(q_tokens, k_tokens)

    def check_tokens(self, q_tokens: int, k_tokens: int | None = None) -> None:
        """`check` of contents, wherever they are."""
        for side, cu, tokens in (("q", self.cu_seqlens_q, q_tokens), ("k", self.cu_k, k_tokens)):
            assert cu is not None
            if tokens is not None and (end := int(on_host(cu)[-1])) != tokens:
                raise InputError(
                    f"cu_seqlens_{side} ends at {end}, {side} has {tokens} tokens",
                    "the last entry equal to the number of packed tokens",
                    "pass cu_seqlens_k where keys are packed differently from queries"
                    if side == "k" and self.cu_seqlens_k is None
                    else f"slice it: {side}[:{end}], or end the last sequence at {tokens} and pass seqused"
                    if end < tokens
                    else f"pass cumulative lengths of these {tokens} tokens",
                )

    def check_padded(self, batch: int, q_len: int, kv_len: int) -> None:
        """Raise InputError unless a padded batch of `batch` sequences of these lengths fits."""
        if self.packed:
            raise InputError(
                "a padded batch with cu_seqlens", "seqused_q and seqused_k alone", "drop cu_seqlens"
            )
        if self.sequences != batch:
            raise InputError(
                f"lengths of {self.sequences} sequences for a batch of {batch}",
                "one per batch entry",
                f"pass the length of each of the {batch} entries",
            )
        if self.checked:
            self._check_contents_again()
            self.check_used(q_len, kv_len)

    def check_used(self, q_len: int, kv_len: int) -> None:
        """`check_padded` of contents, wherever they are."""
        for name, used, length in (
            ("seqused_q", self.seqused_q, q_len),
            ("seqused_k", self.seqused_k, kv_len),
        ):
            if used is not None and (longest := int(on_host(used).max())) > length:
                raise InputError(
                    f"{name} up to {longest} for a length of {length}",
                    f"at most {length}",
                    f"pass tensors that hold {longest} tokens, or {name}.clamp(max={length})",
                )

    def bounds(self, q_len: int | None = None, kv_len: int | None = None) -> list[Bounds]:
        """(q_start, q_stop, k_start, k_stop) of each sequence, in tokens that take part.

        Packed: positions in the packed tensors. Padded: positions in the sequence's own row, for which
        `q_len` and `kv_len` fill in where a `seqused` was not given.
        """
        q = _spans(self.cu_seqlens_q, self.seqused_q, self.sequences, q_len, "q_len")
        k = _spans(self.cu_k, self.seqused_k, self.sequences, kv_len, "kv_len")
        return [(*a, *b) for a, b in zip(q, k, strict=True)]

    def _tensors(self) -> dict[str, Tensor]:
        arguments = {
            "cu_seqlens_q": self.cu_seqlens_q,
            "cu_seqlens_k": self.cu_seqlens_k,
            "seqused_q": self.seqused_q,
            "seqused_k": self.seqused_k,
        }
        return {name: x for name, x in arguments.items() if x is not None}

    def _check_max(self, name: str, bound: int | None, cu: Tensor | None, used: Tensor | None) -> None:
        if bound is None:
            return
        lengths = used if used is not None else None if cu is None else cu[1:] - cu[:-1]
        longest = 0 if lengths is None else int(lengths.max())
        if not is_count(bound, max(longest, 1)):
            raise InputError(
                f"{name}={bound} with a longest sequence of {longest}",
                f"an int >= {max(longest, 1)}",
                f"omit {name}",
            )

    def __repr__(self) -> str:
        parts = [f"{name}={show(tensor)}" for name, tensor in self._tensors().items()]
        bounds = (("max_seqlen_q", self.max_seqlen_q), ("max_seqlen_k", self.max_seqlen_k))
        parts += [f"{name}={bound}" for name, bound in bounds if bound is not None]
        return f"Varlen({', '.join(parts)})"


_right: Alike[None] = Alike(64, 4)
"""Lengths that contradict neither each other nor themselves."""


def _check_vector(name: str, tensor: Tensor) -> None:
    check_integers(name, tensor)
    least = 2 if name.startswith("cu_") else 1
    if tensor.ndim != 1 or tensor.numel() < least:
        raise InputError(
            f"{name} of shape {list(tensor.shape)}",
            "[N + 1], at least two entries" if least == 2 else "[N], at least one entry",
            "flatten it, with one entry per sequence" + (" and the total at the end" if least == 2 else ""),
        )


def _check_alike(arguments: dict[str, Tensor]) -> None:
    if len({tensor.device for tensor in arguments.values()}) > 1:
        raise InputError(
            ", ".join(f"{name} on {tensor.device}" for name, tensor in arguments.items()),
            "one device",
            "move them with .to(q.device)",
        )
    counts = {name: t.numel() - name.startswith("cu_") for name, t in arguments.items()}
    if len(set(counts.values())) > 1:
        raise InputError(
            ", ".join(f"{name} has {count} sequences" for name, count in counts.items()),
            "one number of sequences (cu_seqlens have one entry more)",
            "pass lengths of the same batch",
        )


def _check_values(name: str, tensor: Tensor) -> None:
    if not name.startswith("cu_"):
        if int(tensor.min()) < 0:
            raise InputError(f"{name} of {int(tensor.min())}", "lengths >= 0", "use 0 for an empty sequence")
        return
    if int(tensor[0]) != 0:
        raise InputError(
            f"{name} starts at {int(tensor[0])}", "0 first", "prepend 0 to the cumulative sum of lengths"
        )
    steps = tensor[1:] - tensor[:-1]
    if bool((steps < 0).any()):
        where = int((steps < 0).nonzero()[0, 0])
        raise InputError(
            f"{name} decreases after entry {where}: {int(tensor[where])} to {int(tensor[where + 1])}",
            "a non-decreasing sequence",
            "pass cumulative lengths, not lengths: F.pad(lengths.cumsum(0), (1, 0))",
        )


def _check_used(name: str, used: Tensor | None, cu: Tensor | None) -> None:
    if used is None or cu is None:
        return
    beyond = (used > cu[1:] - cu[:-1]).nonzero()
    if beyond.numel():
        i = int(beyond[0, 0])
        raise InputError(
            f"{name}[{i}] = {int(used[i])}, sequence {i} has {int(cu[i + 1] - cu[i])} tokens",
            "at most the sequence's length",
            f"check {name} against cu_seqlens",
        )


def _spans(
    cu: Tensor | None, used: Tensor | None, count: int, length: int | None, name: str
) -> list[tuple[int, int]]:
    ends = None if cu is None else on_host(cu).tolist()
    starts = [0] * count if ends is None else ends[:-1]
    if used is not None:
        return [(start, start + n) for start, n in zip(starts, on_host(used).tolist(), strict=True)]
    if ends is not None:
        return list(zip(starts, ends[1:], strict=True))
    if length is None:
        raise InputError(
            f"bounds() of a padded batch without {name}", f"{name} in tokens", f"pass {name}=..."
        )
    return [(0, length)] * count
