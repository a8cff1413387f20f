"""Trees of rollouts: sequences that share prefixes, as groups of samples and turns do, with each token once.

`fold` lays the tokens of a prefix tree (a trie) out in depth-first order. A token then attends exactly those
above it, `enter[k] <= enter[q] < leave[k]`, and every layer of a causal model computes for it what it would
compute in any of the sequences that hold it. Values per token unfold to sequences; gradients and weights
fold.

Which tokens are one is decided from contents, on the host. Nothing after that reads any.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fa4flex.errors import InputError
from fa4flex.primitives.base import Mod, accepted_context, kind_of, settle
from fa4flex.primitives.mask import Mask, as_mask
from fa4flex.primitives.placed import PlacedMask, PlacedScore
from fa4flex.primitives.score import ScoreMod, as_score
from fa4flex.trie import Trie
from fa4flex.variants.prefix_tree import prefix_tree

__all__ = ["Folded", "fold"]

Ragged = Sequence[Any] | Tensor
"""One value per token of each sequence: tensors [len, ..], or one [B, S, ..], of whose rows the first len."""


@dataclass(frozen=True, eq=False, repr=False)
class Folded:
    """A batch of N sequences as a forest of T tokens, in depth-first order.

    tokens     [T], of the dtype that was given
    positions  int64 [T]: the place of a token in each sequence that holds it, which is its depth
    parents    int64 [T]: the token before it, -1 where sequences begin
    leave      int32 [T]: the end of the subtree below a token; `enter` is its beginning
    index      int64 [sum of lengths]: the folded token of each token of each sequence, one after another
    lengths    N numbers
    longest    the largest of them
    also       [T, ..] each: what `fold` was given beside the tokens
    """

    tokens: Tensor
    positions: Tensor
    parents: Tensor
    leave: Tensor
    index: Tensor
    lengths: tuple[int, ...]
    longest: int
    also: tuple[Tensor, ...] = ()

    @property
    def enter(self) -> Tensor:
        """int32 [T]: the number of a token in depth-first order, its own."""
        return torch.arange(len(self.tokens), dtype=torch.int32, device=self.tokens.device)

    @property
    def counts(self) -> Tensor:
        """int64 [T]: the number of sequences that hold a token."""
        return torch.bincount(self.index, minlength=len(self.tokens))

    @property
    def saved(self) -> int:
        """Number of tokens that are not computed again."""
        return len(self.index) - len(self.tokens)

    @property
    def mask(self) -> Mask:
        """The mask of attention over the folded tokens: a token sees itself and the tokens above it."""
        return prefix_tree(self.leave)

    def at_positions(self, mod: Any) -> Any:
        """A mask, or a score mod, that is asked about positions in a sequence instead of folded places.

        Whatever depends on the distance from query to key needs it: `folded.mask &
        folded.at_positions(sliding_window(1024))`, `folded.at_positions(alibi)`. Lengths are those of the
        longest sequence, for queries and keys. Raises InputError for what is neither.
        """
        settled = settle(mod)
        if isinstance(settled, Mod):
            as_mod = settled
        elif callable(settled):
            as_mod = as_score(settled) if _takes_a_score(settled) else as_mask(settled)
        else:
            raise InputError(
                f"at_positions({kind_of(mod)})", "a mask or a score mod", "pass a function of indices"
            )
        kind = PlacedScore if isinstance(as_mod, ScoreMod) else PlacedMask
        return kind(as_mod, self.positions.to(torch.int32), self.longest)

    def unfold(self, x: Tensor, dim: int = 0) -> list[Tensor]:
        """A value per folded token, T in `dim`, as a value per token of each sequence: N tensors.

        Gradients of tokens that sequences share add up. Raises InputError for another number of tokens.
        """
        if x.ndim == 0 or not -x.ndim <= dim < x.ndim or x.shape[dim] != len(self.tokens):
            raise InputError(
                f"unfold(<{list(x.shape)}>, dim={dim}) of {len(self.tokens)} folded tokens",
                f"{len(self.tokens)} values in that dimension",
                "of a model's [1, T, ..] pass [0], or dim=1",
            )
        return list(x.index_select(dim, self.index).split(list(self.lengths), dim))

    def padded(self, x: Tensor, value: float = 0) -> Tensor:
        """A value per folded token [T, ..] as [N, longest, ..], `value` behind the end of a sequence."""
        return torch.nn.utils.rnn.pad_sequence(self.unfold(x), batch_first=True, padding_value=value)

    def fold_weights(self, weights: Ragged) -> Tensor:
        """The sum of the weights that sequences give a token, [T, ..]: the transpose of `unfold`.

        `(folded_loss * folded.fold_weights(w)).sum()` is the weighted sum over all tokens of all sequences.
        """
        flat = self._flat(weights, "weights")
        return flat.new_zeros(len(self.tokens), *flat.shape[1:]).index_add(0, self.index, flat)

    def first(self, values: Ragged) -> Tensor:
        """The value that the first sequence with a token gives it, [T, ..], where all of them agree."""
        flat = self._flat(values, "values")
        return flat.index_select(0, self._holders())

    def log_probs(self, logits: Tensor) -> Tensor:
        """The log-probability of each token behind those above it, float32 [T], of logits [T, vocabulary].

        The last token of a shared prefix has a target in each branch; so this is a value of the token that is
        predicted, not of the one that predicts: 0 for the first of a sequence. Float64 for float64.
        """
        if logits.ndim != 2 or len(logits) != len(self.tokens):
            raise InputError(
                f"log_probs(<{list(logits.shape)}>) of {len(self.tokens)} folded tokens",
                f"logits [{len(self.tokens)}, vocabulary]",
                "of a model's [1, T, vocabulary] pass logits[0]",
            )
        wide = torch.promote_types(logits.dtype, torch.float32)
        above = self.parents.clamp(min=0)
        normaliser = torch.logsumexp(logits.to(wide), 1).index_select(0, above)
        chosen = logits[above, self.tokens.long()].to(wide) - normaliser
        return torch.where(self.parents < 0, 0, chosen)

    def to(self, device: torch.device | str) -> Folded:
        """The same on another device."""
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        moved = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in moved.items()}
        return replace(self, **{**moved, "also": tuple([x.to(device) for x in self.also])})

    def explain(self) -> str:
        """Numbers of tokens, of pairs of queries and keys, and what share of them is saved."""
        pairs, unfolded = int((self.positions + 1).sum()), sum(n * (n + 1) // 2 for n in self.lengths)
        roots = int((self.parents < 0).sum())
        return (
            f"{len(self.lengths)} sequences of {len(self.index)} tokens in {roots} "
            f"tree{'s' * (roots != 1)} of {len(self.tokens)}: "
            f"{_times(len(self.index), len(self.tokens))} fewer tokens, "
            f"{_times(unfolded, pairs)} fewer pairs of a query and a key"
        )

    def __repr__(self) -> str:
        return f"<Folded: {len(self.lengths)} sequences, {len(self.tokens)} of {len(self.index)} tokens>"

    def _holders(self) -> Tensor:
        """int64 [T]: the first token of all sequences, one after another, that is the folded one."""
        places = torch.arange(len(self.index), device=self.index.device)
        last = torch.full_like(self.tokens, len(self.index), dtype=torch.int64)
        return last.scatter_reduce(0, self.index, places, "amin")

    def _flat(self, values: Ragged, name: str) -> Tensor:
        return _one_after_another(values, self.lengths, name).to(self.index.device)


def fold(
    sequences: Ragged, lengths: Sequence[int] | Tensor | None = None, *, also: Sequence[Ragged] = ()
) -> Folded:
    """Shares the common prefixes of sequences.

    sequences  N sequences of token ids, lists or integer tensors [len]; or a padded batch, integer [N, S]
    lengths    those of a padded batch, [N]; None: S each
    also       values per token, in the form of `sequences` with any further dimensions, in which tokens have
               to agree, bit by bit, to be shared: images, adapters, whatever else a model is given

    Trees, and the branches of a node, lie in the order in which sequences first come to them. The result lies
    where the tokens lie. Equal sequences are one path; an empty one has no token. Raises InputError.
    """
    rows, device, dtype = _rows(sequences, lengths)
    sizes = tuple([len(row) for row in rows])
    extra = [_one_after_another(values, sizes, f"also[{n}]") for n, values in enumerate(also)]
    trie = Trie.of(_records(rows, sizes, extra))
    made: dict[str, Any] = {name: torch.from_numpy(x).to(device) for name, x in trie.arrays().items()}
    tokens = torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *rows])).to(dtype).to(device)
    result = Folded(tokens[:0], lengths=sizes, longest=max(sizes, default=0), **made)
    result = replace(result, tokens=tokens.new_zeros(len(result.parents)))
    holders = result._holders()
    return replace(
        result,
        tokens=tokens[holders],
        also=tuple([x.to(device).index_select(0, holders) for x in extra]),
    )


def _rows(
    sequences: Ragged, lengths: Sequence[int] | Tensor | None
) -> tuple[list[np.ndarray[Any, Any]], torch.device, torch.dtype]:
    """Sequences as arrays of int64 on the host, their device and dtype."""
    if isinstance(sequences, Tensor) or (isinstance(sequences, np.ndarray) and sequences.dtype != object):
        batch = torch.as_tensor(sequences)
        if batch.ndim != 2:
            raise _unlike(f"sequences of <{list(batch.shape)}>")
        sizes = _sizes(lengths, batch)
        host = _integers(batch, "sequences").cpu().numpy()
        rows = [row[:size].astype(np.int64) for row, size in zip(host, sizes, strict=True)]
        return rows, batch.device, batch.dtype
    if lengths is not None:
        raise InputError(
            "fold(lengths=...) beside a list of sequences",
            "lengths of a padded batch [N, S] alone",
            "leave out lengths, or pass a tensor",
        )
    tensors = [torch.as_tensor(row) for row in sequences]
    if any(x.ndim != 1 for x in tensors):
        raise _unlike(f"a sequence of <{next(list(x.shape) for x in tensors if x.ndim != 1)}>")
    tensors = [_integers(x, f"sequences[{n}]") for n, x in enumerate(tensors)]
    kinds = {(x.device, x.dtype) for x in tensors if len(x)}
    if len(kinds) > 1:
        raise InputError(
            f"sequences of {', '.join(sorted(f'{dtype} on {device}' for device, dtype in kinds))}",
            "one dtype and device",
            "convert them",
        )
    device, dtype = next(iter(kinds), (torch.device("cpu"), torch.int64))
    return [x.cpu().numpy().astype(np.int64) for x in tensors], device, dtype


def _integers(x: Tensor, name: str) -> Tensor:
    if not x.numel():
        return x.long()
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise InputError(f"{name} of {x.dtype}", "integers", "pass token ids, and other values as also=[...]")
    return x


def _sizes(lengths: Sequence[int] | Tensor | None, batch: Tensor) -> list[int]:
    rows, longest = batch.shape
    if lengths is None:
        return [longest] * rows
    given = lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)
    if len(given) != rows or not all(isinstance(n, int) and 0 <= n <= longest for n in given):
        raise InputError(
            f"fold(lengths={given[:8]}) of a batch [{rows}, {longest}]",
            f"{rows} numbers from 0 to {longest}",
            "e.g. attention_mask.sum(1), where padding is at the end",
        )
    return given


def _one_after_another(values: Ragged, lengths: tuple[int, ...], name: str) -> Tensor:
    """[sum of lengths, ..] of a value per token of each sequence."""
    if isinstance(values, Tensor):
        longest = max(lengths, default=0)
        if values.ndim < 2 or len(values) != len(lengths) or values.shape[1] < longest:
            raise InputError(
                f"{name} of <{list(values.shape)}> for {len(lengths)} sequences of up to {longest} tokens",
                f"[{len(lengths)}, {longest}, ..] or a list",
                "pass a value per token of each sequence",
            )
        ends = torch.tensor(lengths, device=values.device).unsqueeze(1)
        return values[torch.arange(values.shape[1], device=values.device) < ends]
    parts = [torch.as_tensor(x) for x in values]
    if [len(x) if x.ndim else -1 for x in parts] != list(lengths):
        raise InputError(
            f"{name} of lengths {[list(x.shape)[:1] for x in parts][:8]}",
            f"those of the sequences, {list(lengths)[:8]}",
            "pass a value per token of each sequence",
        )
    return torch.cat(parts) if parts else torch.zeros(0)


def _records(
    rows: list[np.ndarray[Any, Any]], sizes: tuple[int, ...], extra: list[Tensor]
) -> list[np.ndarray[Any, Any]]:
    """Each sequence as bytes [len, bytes of a token and of what has to be equal beside it]."""
    tokens = np.concatenate([np.zeros(0, np.int64), *rows])
    parts = [tokens.view(np.uint8).reshape(len(tokens), 8)]
    for x in extra:
        flat = x.detach().cpu().contiguous().reshape(len(tokens), -1)
        parts.append(flat.view(torch.uint8).numpy() if flat.numel() else np.zeros((len(tokens), 0), np.uint8))
    whole = np.ascontiguousarray(np.concatenate(parts, 1))
    return np.split(whole, np.cumsum(sizes)[:-1]) if sizes else []


def _takes_a_score(mod: Callable[..., Any]) -> bool:
    return len(inspect.signature(mod).parameters) - len(accepted_context(mod)) == 5


def _unlike(given: str) -> InputError:
    return InputError(given, "a list of 1-D sequences, or one batch [N, S]", "pass one sequence per sample")


def _times(more: int, fewer: int) -> str:
    return f"{more / max(fewer, 1):.2f}x"
