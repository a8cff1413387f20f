"""Masks and score mods as objects: truth values, copies and pickles."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fa4flex
from fa4flex.errors import TraceError, UnsupportedError
from fa4flex.primitives.base import Mod, copy_function
from fa4flex.primitives.mask import MaskMod, mask_family
from fa4flex.primitives.score import score_family
from fa4flex.variants import (
    alibi,
    causal,
    document,
    learned_bias,
    natten,
    prefix_lm,
    sliding_window,
    softcap,
    streaming_llm,
)
from fa4flex.variants._cases import allowed, scored

SIZE = 12
IDS = torch.arange(SIZE) // 5
SLOPES = torch.tensor([0.5, 0.25])
BLOCKS = fa4flex.BlockMap.from_dense(torch.tril(torch.ones(3, 3)).bool(), 4)


def every_third(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx % 3 == 0


def halved(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score / 2


def above(b: Any, h: Any, q_idx: Any, kv_idx: Any, least: int) -> Any:
    return kv_idx >= least


@mask_family
def own_family(keys: int) -> MaskMod:
    return lambda b, h, q_idx, kv_idx: kv_idx < keys


MASKS: dict[str, Callable[[], fa4flex.Mask]] = {
    "named": lambda: causal(),
    "parameter": lambda: sliding_window(5),
    "keyword": lambda: streaming_llm(1, window=3),
    "tensor": lambda: document(IDS),
    "canvas": lambda: natten((3, 4), 3),
    "and": lambda: causal & document(IDS),
    "or and not": lambda: ~sliding_window(3) | prefix_lm(2),
    "bound": lambda: causal().bind(q_len=SIZE, kv_len=SIZE) & sliding_window(2),
    "function": lambda: fa4flex.as_mask(every_third) & causal,
    "partial": lambda: fa4flex.as_mask(functools.partial(above, least=4)),
    "blocks": lambda: BLOCKS.mask(causal()),
    "own family": lambda: own_family(4),
}
SCORES: dict[str, Callable[[], fa4flex.ScoreMod]] = {
    "defaults": lambda: alibi(),
    "slopes": lambda: alibi(SLOPES),
    "chain": lambda: alibi(SLOPES, symmetric=True) >> softcap(20.0) >> halved,
    "bias": lambda: learned_bias(torch.linspace(-1, 1, 2 * 9).view(2, 9)),
}


def same_values(one: Mod, other: Mod) -> None:
    assert repr(one) == repr(other) and one.context == other.context
    if isinstance(one, fa4flex.Mask):
        assert isinstance(other, fa4flex.Mask)
        assert torch.equal(allowed(one, SIZE, SIZE), allowed(other, SIZE, SIZE))
    else:
        scores = torch.randn(2, SIZE, SIZE)
        assert isinstance(one, fa4flex.ScoreMod) and isinstance(other, fa4flex.ScoreMod)
        assert torch.equal(scored(one, scores), scored(other, scores))


# --- truth values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", [causal, causal(), causal & sliding_window(2), ~causal(), document(IDS)], ids=repr
)
def test_a_mask_has_no_truth_value(value: Any) -> None:
    for use in (lambda: value and causal, lambda: causal() or value, lambda: not value, lambda: bool(value)):
        with pytest.raises(TraceError, match=r"(?s)truth value.*&.*\|.*~"):
            use()
    with pytest.raises(TypeError):
        if value:
            pass


@pytest.mark.parametrize("value", [softcap, softcap(3.0), alibi >> softcap(3.0)], ids=repr)
def test_a_score_mod_has_no_truth_value(value: Any) -> None:
    with pytest.raises(TraceError, match=r"(?s)truth value.*>>"):
        assert value or alibi
    with pytest.raises(TraceError):
        bool(value)


@pytest.mark.parametrize("value", [causal, causal(), alibi >> softcap(3.0)], ids=repr)
def test_dynamo_may_ask_whether_there_is_a_function(value: Any) -> None:
    """Dynamo of torch 2.11 asks so before it traces a call with `**`."""
    names = {"__name__": "torch._dynamo.symbolic_convert", "value": value}
    assert eval("bool(value)", names)
    with pytest.raises(TraceError):
        eval("bool(value)", {**names, "__name__": "torch"})


# --- pickle and deepcopy --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*MASKS, *SCORES])
def test_pickles_and_copies(name: str) -> None:
    mod: Mod = (MASKS[name] if name in MASKS else SCORES[name])()
    for again in (pickle.loads(pickle.dumps(mod)), copy.deepcopy(mod), copy.copy(mod)):
        same_values(mod, again)


def test_families_are_shared_by_copies_and_pickles() -> None:
    for family in (causal, alibi, own_family):
        assert copy.deepcopy(family) is family and copy.copy(family) is family
        assert pickle.loads(pickle.dumps(family)) is family

    @mask_family
    def local() -> MaskMod:
        return every_third

    assert copy.deepcopy(local) is local
    for thing in (local, local()):
        with pytest.raises(UnsupportedError, match=r"(?s)local.*module level"):
            pickle.dumps(thing)


PIECES = [
    BLOCKS,
    fa4flex.Varlen(torch.tensor([0, 3, 9]), seqused_k=torch.tensor([2, 4])),
    fa4flex.Paging(torch.tensor([[0, 1]]), torch.tensor([7])),
    fa4flex.Sinks(torch.tensor([0.5, 1.0])),
    fa4flex.Precision("float64", torch.float32),
    fa4flex.Schedule((64, 32), deterministic=True, order="row_major"),
]


@pytest.mark.parametrize("piece", PIECES, ids=lambda piece: type(piece).__name__)
def test_pieces_pickle_and_copy(piece: Any) -> None:
    for again in (pickle.loads(pickle.dumps(piece)), copy.deepcopy(piece)):
        assert repr(again) == repr(piece)
        for name, value in vars(piece).items():
            if isinstance(value, Tensor):
                assert torch.equal(value, getattr(again, name))
                assert value.data_ptr() != getattr(again, name).data_ptr()


def test_a_variant_pickles_and_copies() -> None:
    variant = fa4flex.compile(
        alibi(SLOPES) >> softcap(20.0), causal & document(IDS), sinks=torch.zeros(2), scale=0.5
    ).variant
    for again in (pickle.loads(pickle.dumps(variant)), copy.deepcopy(variant)):
        assert repr(again) == repr(variant)
        q = torch.randn(1, 2, SIZE, 8)
        one, other = (
            fa4flex.compile(v.score_mod, v.mask, sinks=v.sinks, scale=v.scale)(q, q, q)
            for v in (variant, again)
        )
        assert torch.equal(one, other)


def test_what_pickle_cannot_carry_is_named() -> None:
    bound = 3
    closure = lambda b, h, q_idx, kv_idx: kv_idx < bound  # noqa: E731

    def local(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * bound

    for mod, name in (
        (fa4flex.as_mask(closure), "<lambda>"),
        (causal & closure, "<lambda>"),
        (fa4flex.as_mask(functools.partial(closure)), "<lambda>"),
        (fa4flex.as_score(local) >> softcap, "local"),
    ):
        with pytest.raises(UnsupportedError, match=rf"(?s){name}.*module level.*{__file__}"):
            pickle.dumps(mod)


def test_a_copy_of_a_family_reads_the_copied_tensor() -> None:
    module = nn.Module()
    module.slopes = nn.Parameter(torch.tensor([0.5, 0.25]))
    module.mod = alibi(module.slopes) >> softcap(30.0)
    other = copy.deepcopy(module)
    loaded = pickle.loads(pickle.dumps(module))
    scores = torch.randn(2, SIZE, SIZE)
    before = scored(module.mod, scores)
    for again in (other, loaded):
        with torch.no_grad():
            again.slopes.zero_()
        assert torch.equal(scored(module.mod, scores), before)
        torch.testing.assert_close(scored(again.mod, scores), 30 * torch.tanh(scores / 30))


# --- functions that close over a module -----------------------------------------------------------------


class Biased(nn.Module):
    """Every way in which a mod reaches a module's tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(2))
        self.register_buffer("limit", torch.zeros(2))
        weight, limit = self.bias, self.limit
        helper = lambda h: self.bias[h]  # noqa: E731

        def with_default(score: Any, b: Any, h: Any, q: Any, kv: Any, *, table: Tensor = weight) -> Any:
            return score + table[h]

        functions: dict[str, Callable[..., Any]] = {
            "self": lambda s, b, h, q, kv: s + self.bias[h],
            "parameter": lambda s, b, h, q, kv: s + weight[h],
            "buffer": lambda s, b, h, q, kv: s + limit[h],
            "method": self.method,
            "partial": functools.partial(self.two, weight),
            "partial method": functools.partial(Biased.two, self, weight),
            "default": with_default,
            "nested": lambda s, b, h, q, kv: s + helper(h),
            "listed": (lambda listed: lambda s, b, h, q, kv: s + listed[0](h))([helper]),
        }
        self.mods = {name: fa4flex.as_score(function) for name, function in functions.items()}
        self.mask = causal & (lambda b, h, q, kv: limit[h] >= 0)

    def method(self, s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s + self.bias[h]

    def two(self, table: Any, s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s + table[h]


@pytest.mark.parametrize("name", list(Biased().mods))
def test_a_copied_module_s_mod_reads_the_copy(name: str) -> None:
    module = Biased()
    other = copy.deepcopy(module)
    scores = torch.zeros(2, 3, 3)
    with torch.no_grad():
        other.bias += 1
        other.limit += 1
    assert torch.equal(scored(module.mods[name], scores), scores)
    assert torch.equal(scored(other.mods[name], scores), scores + 1)
    with torch.no_grad():
        module.bias += 5
        module.limit += 5
    assert torch.equal(scored(other.mods[name], scores), scores + 1)


def test_a_copied_module_s_composed_mask_reads_the_copy() -> None:
    module = Biased()
    other = copy.deepcopy(module)
    other.limit -= 1
    assert not allowed(other.mask, 4, 4).any()
    assert torch.equal(allowed(module.mask, 4, 4), allowed(causal(), 4, 4))


def test_a_mod_that_its_module_holds_is_copied_once() -> None:
    module = nn.Module()
    module.bias = nn.Parameter(torch.zeros(2))
    module.mod = fa4flex.as_score(lambda s, b, h, q, kv: s + module.bias[h])
    mod = copy.deepcopy(module.mod)
    inner = mod.mod.__closure__[0].cell_contents  # type: ignore[attr-defined]
    assert inner is not module and inner.mod is mod


def test_functions_share_cells_as_before() -> None:
    def pair() -> tuple[Callable[[], Any], Callable[[int], None]]:
        value = [0]

        def read() -> Any:
            return value[0]

        def write(number: int) -> None:
            nonlocal value
            value = [number]

        return read, write

    read, write = pair()
    memo: dict[int, Any] = {}
    other_read, other_write = copy_function(read, memo), copy_function(write, memo)
    other_write(7)
    assert (read(), other_read()) == (0, 7)
    write(3)
    assert (read(), other_read()) == (3, 7)


def test_functions_without_state_are_themselves() -> None:
    from torch.nn.functional import gelu, interpolate

    def recursive(n: int) -> int:
        return 0 if n == 0 else recursive(n - 1)

    for function in (every_third, torch.unique, gelu, interpolate, torch.relu, len, causal):
        assert copy_function(function, {}) is function
    again = copy_function(recursive, {})
    assert again.__closure__[0].cell_contents is again  # type: ignore[attr-defined]
    assert again.__globals__ is recursive.__globals__ and again.__qualname__ == recursive.__qualname__  # type: ignore[attr-defined]


def test_a_function_given_to_a_family_is_copied_too() -> None:
    @score_family
    def times(factor: Callable[[], Tensor]) -> Callable[..., Any]:
        return lambda s, b, h, q, kv: s * factor()

    module = nn.Module()
    module.factor = nn.Parameter(torch.tensor(2.0))
    module.mod = times(lambda: module.factor)
    other = copy.deepcopy(module)
    with torch.no_grad():
        module.factor.fill_(5.0)
    assert float(scored(other.mod, torch.ones(1, 1, 1)).detach()) == 2.0


def test_a_score_family_of_the_user_is_rebuilt_from_copied_arguments() -> None:
    @score_family
    def scaled(by: Tensor) -> Callable[..., Any]:
        return lambda s, b, h, q, kv: s * by

    by = torch.tensor(2.0)
    mod = scaled(by)
    other = copy.deepcopy(mod)
    by.fill_(5.0)
    assert torch.equal(scored(other, torch.ones(1, 2, 2)), torch.full((1, 2, 2), 2.0))
    assert repr(mod) == "scaled(torch.tensor(5.0, dtype=torch.float32))"


def test_a_partial_s_own_length_is_kept() -> None:
    def below(b: Any, h: Any, q_idx: Any, kv_idx: Any, kv_len: Any) -> Any:
        return kv_idx < kv_len // 2

    mask = fa4flex.as_mask(functools.partial(below, kv_len=4))
    assert mask.context == () and int(allowed(mask, 1, SIZE).sum()) == 2
