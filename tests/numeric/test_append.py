"""Appending keys and values to pages on a CPU: as token by token, and whatever is wrong is told."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from append_cases import HOWS, How, Tokens, drawn
from torch import Tensor

import fa4flex
from fa4flex import InputError, KVScales, Paging, QKNorm, Rotary, UnsupportedError, Varlen
from fa4flex.primitives.kv_scales import E4M3


@pytest.mark.parametrize("name", HOWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_append(name: str, dtype: torch.dtype) -> None:
    drawn(replace(HOWS[name], dtype=dtype)).check()


def test_any_lengths_draw() -> None:
    for _ in range(10):
        how = replace(random.choice(list(HOWS.values())), page_size=random.randint(1, 9))
        before, new = (tuple(random.randint(0, 20) for _ in range(4)) for _ in range(2))
        drawn(how, before, (1, *new[1:])).check()


def test_lengths_in_place() -> None:
    given = drawn(How())
    before = given.paging.seqused_k.clone()
    found = given(in_place=True)
    assert torch.equal(given.paging.seqused_k, found.seqused_k) and (found.seqused_k == before + 5).all()
    assert found.q is None


def test_what_was_appended_is_attended_to() -> None:
    """Rotated and appended in chunks, as if all had been there."""
    cos, sin = (torch.rand(40, 8) for _ in range(2))
    q, k, v = (torch.randn(2, 2, 9, 16) for _ in range(3))
    pools = [torch.zeros(8, 4, 2, 16) for _ in range(2)]
    paging = Paging(torch.arange(6).view(2, 3), torch.zeros(2, dtype=torch.int32))
    attn, rotary, outs = fa4flex.compile(mask=fa4flex.variants.causal), Rotary(cos, sin), []
    for part in (slice(0, 4), slice(4, 5), slice(5, 9)):
        new = fa4flex.append(
            k[:, :, part], v[:, :, part], *pools, paging, rotary=rotary, q=q[:, :, part], in_place=True
        )
        outs.append(attn(new.q, *pools, paging=paging))
    position = torch.arange(9)
    q, k = (
        torch.stack([rotary.turned(one.transpose(0, 1), position).transpose(0, 1) for one in x])
        for x in (q, k)
    )
    torch.testing.assert_close(torch.cat(outs, 2), attn(q, k, v))


def test_inside_torch_compile() -> None:
    """The operator's mutation is seen: pools are written when the graph runs, and read after that."""
    given = drawn(How(turning=16, queries=True, dtype=torch.float32))
    rotary, q = given.options["rotary"], given.options["q"]

    def step(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, table: Tensor, used: Tensor) -> Any:
        new = fa4flex.append(k, v, k_pool, v_pool, Paging(table, used), rotary=rotary, q=q)
        return new.seqused_k, new.q, k_pool.nan_to_num().sum()

    exact = given.expected()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    tensors = given.k, given.v, given.k_pool, given.v_pool, given.paging.page_table, given.paging.seqused_k
    lengths, turned, total = compiled(*tensors)
    torch.testing.assert_close(given.k_pool.nan_to_num(), exact[0].nan_to_num())
    torch.testing.assert_close(turned, exact[3])
    assert torch.equal(lengths, exact[2])
    torch.testing.assert_close(total, exact[0].nan_to_num().sum())


def test_the_operator_is_registered_right() -> None:
    given = drawn(How(dtype=torch.float32))
    paging = given.paging
    pools = (torch.zeros_like(given.k_pool), torch.zeros_like(given.v_pool))
    one = (given.k, given.v, *pools, paging.page_table, paging.seqused_k, None, None, None, None, False, None)
    torch.library.opcheck(torch.ops.fa4flex.append.default, one)


def test_scales_are_written_inside_torch_compile() -> None:
    given = drawn(How(scales="token", turning=16, norm="k"))
    alone = replace(given, **{x: getattr(given, x).clone() for x in ("k_pool", "v_pool")})
    scales = KVScales(*(x.clone() for x in given.scales() if x is not None))
    options = {**given.options, "kv_scales": scales}

    def step(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor) -> Tensor:
        return fa4flex.append(k, v, k_pool, v_pool, given.paging, **options).seqused_k

    torch.compile(step, backend="aot_eager", fullgraph=True)(given.k, given.v, alone.k_pool, alone.v_pool)
    given()
    for x, y in zip((given.k_pool, *given.scales()), (alone.k_pool, scales.k, scales.v), strict=True):
        assert torch.equal(x.float().nan_to_num(), y.float().nan_to_num())


def _length(given: Tokens, value: int) -> Tokens:
    given.paging.seqused_k[1] = value
    return given


def _page(given: Tokens, value: int) -> Tokens:
    given.paging.page_table[1, 0] = value
    return given


def _ends(given: Tokens, value: int) -> Tokens:
    given.options["varlen"].cu_seqlens_q[3] = value
    return given


def _position(given: Tokens, value: int) -> Tokens:
    given.options["positions"][..., 1, 0] = value
    given.options["positions"].clamp_(max=max(value, 0))  # the first of those that are wrong is told
    return given


def _axis(given: Tokens, value: int) -> Tokens:
    given.options["rotary"].axes[2] = value
    return given


WRONG: dict[str, tuple[Callable[[Tokens], Tokens], How, str]] = {
    "negative length": (lambda x: _length(x, -1), How(), "seqused_k of -1"),
    "past the table": (lambda x: _length(x, 22), How(), "seqused_k of 22 and 5 tokens to append"),
    "no page": (lambda x: _page(x, -3), How(), "page -3 in the page table"),
    "page past the pool": (lambda x: _page(x, 99), How(), "page 99 in the page table"),
    "ends": (lambda x: _ends(x, 9), How(packed=True), "cu_seqlens_q ends at 9"),
    "no angles": (
        lambda x: replace(x, options={"rotary": Rotary(torch.ones(6, 4), torch.ones(6, 4))}),
        How(),
        "position 16",
    ),
    "position below 0": (lambda x: _position(x, -1), How(turning=16, axes=0), "position -1"),
    "position of an axis": (lambda x: _position(x, 99), How(turning=16, axes=3), "position 99"),
    "no such axis": (lambda x: _axis(x, 3), How(turning=16, axes=3), "axis 3 of an angle"),
    "8 bits": (lambda x: _page(x, 99), How(scales="token"), "page 99 in the page table"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_contents_write_nothing(name: str) -> None:
    plant, how, message = WRONG[name]
    given = plant(drawn(how))
    kept = [given.k_pool, *(x for x in given.scales() if x is not None)]
    before = [x.clone() for x in kept]
    with pytest.raises(InputError, match=message):
        given()
    for x, y in zip(kept, before, strict=True):
        assert torch.equal(x.float().nan_to_num(), y.float().nan_to_num())


def _with(**options: Any) -> Callable[[Tokens], Tokens]:
    return lambda x: replace(x, options=options)


_ROTARY = Rotary(torch.ones(40, 4), torch.ones(40, 4))
_AXES = replace(_ROTARY, axes=torch.zeros(4, dtype=torch.int32))
REFUSED: dict[str, tuple[Callable[[Tokens], Tokens], str]] = {
    "another width": (lambda x: replace(x, k=x.k[..., 1:]), "with heads, widths"),
    "another dtype": (lambda x: replace(x, k=x.k.double(), v=x.v.double()), "with heads, widths"),
    "other heads": (lambda x: replace(x, k=x.k[:, :1], v=x.v[:, :1]), "with heads, widths"),
    "packed without lengths": (lambda x: replace(x, k=x.k[0], v=x.v[0]), "cu_seqlens"),
    "q alone": (lambda x: replace(x, options={"q": x.k}), "q without rotary"),
    "another batch": (lambda x: replace(x, k=x.k[:2], v=x.v[:2]), "2 sequences of new keys"),
    "lengths of keys": (
        lambda x: replace(x, options={"varlen": Varlen(seqused_k=torch.ones(3, dtype=torch.int32))}),
        "seqused_k",
    ),
    "too many angles": (
        lambda x: replace(x, options={"rotary": Rotary(torch.ones(40, 17), torch.ones(40, 17))}),
        "17 angles",
    ),
    "positions alone": (_with(positions=torch.zeros(3, 5, dtype=torch.int32)), "positions without rotary"),
    "positions of others": (
        _with(rotary=_ROTARY, positions=torch.zeros(3, 4, dtype=torch.int32)),
        r"positions positions torch.int32 \[3, 4\]",
    ),
    "positions that are floats": (_with(rotary=_ROTARY, positions=torch.zeros(3, 5)), "int32 or int64"),
    "axes without positions": (_with(rotary=_AXES), "axes and no positions"),
    "axes and one position": (
        _with(rotary=_AXES, positions=torch.zeros(3, 5, dtype=torch.int32)),
        "'axes', 3, 5",
    ),
    "no norm": (_with(norm=torch.ones(32)), "norm is a Tensor"),
    "weights of another width": (_with(norm=QKNorm(k=torch.ones(31))), "k weights of 31 elements"),
    "weights of no queries": (_with(norm=QKNorm(q=torch.ones(32))), "weights of q without q"),
    "scales of 16 bits": (_with(kv_scales=KVScales()), "kv_scales for pools of torch.bfloat16"),
}
REFUSED_8_BITS: dict[str, tuple[Callable[[Tokens], Tokens], str]] = {
    "tokens of 8 bits": (
        lambda x: replace(x, k=x.k.to(E4M3), v=x.v.to(E4M3), options={"kv_scales": KVScales(torch.ones(2))}),
        "scales of tokens that have 8 bits",
    ),
    "one pool": (lambda x: replace(x, v_pool=x.v_pool.bfloat16()), "the same dtype, pages"),
    "scales of one": (_with(kv_scales=KVScales(k=torch.ones(20, 4, 2))), "for both, or for neither"),
    "scales of another shape": (_with(kv_scales=KVScales(k=torch.ones(3))), "k scales of shape"),
    "scales that are one number": (
        _with(kv_scales=KVScales(*(torch.ones(()).expand(20, 4, 2) for _ in "kv"))),
        "which are written",
    ),
}


@pytest.mark.parametrize("name", REFUSED_8_BITS)
def test_refused_of_8_bits(name: str) -> None:
    plant, message = REFUSED_8_BITS[name]
    given = drawn(How(scales="none"))
    with pytest.raises(InputError, match=message):
        plant(given)()


def test_pages_are_asked_for() -> None:
    given = drawn(How())
    with pytest.raises(InputError, match=r"paging is a NoneType.*\n.*fa4flex.Paging"):
        fa4flex.append(given.k, given.v, given.k_pool, given.v_pool, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    plant, message = REFUSED[name]
    with pytest.raises(InputError, match=message):
        plant(drawn(How()))()


def test_tables_of_angles_are_checked() -> None:
    with pytest.raises(InputError, match="two tables of one shape"):
        Rotary(torch.ones(4, 2), torch.ones(4, 3))
    with pytest.raises(InputError, match="half"):
        Rotary(torch.ones(4), torch.ones(4))
    with pytest.raises(InputError, match="floats"):
        Rotary(torch.ones(4, 2, dtype=torch.int32), torch.ones(4, 2))
    for axes, words in (
        (torch.zeros(2), "int32 tensor"),
        (torch.zeros(3, dtype=torch.int32), "axis of each"),
    ):
        with pytest.raises(InputError, match=words):
            Rotary(torch.ones(4, 2), torch.ones(4, 2), axes=axes)


def test_weights_are_checked() -> None:
    for given, words in (
        ({}, "neither q nor k"),
        ({"k": torch.ones(2, 3)}, "k weights of"),
        ({"k": torch.ones(2, dtype=torch.int32)}, "k weights of"),
        ({"q": torch.ones(2), "k": torch.ones(3)}, "one shape"),
    ):
        with pytest.raises(InputError, match=words):
            QKNorm(**given)


def test_as_torch_normalises() -> None:
    """Keys of a cache are those of torch's own norm."""
    given = drawn(How(norm="k", dtype=torch.float32))
    norm = given.options["norm"]
    given()
    exact = torch.nn.functional.rms_norm(given.k, (32,), norm.k, norm.eps)
    assert int(given.paging.seqused_k[1]) == 0
    torch.testing.assert_close(given.k_pool[given.paging.page_table[1, 0], 0], exact[1, :, 0])


def test_attention_takes_the_scales_that_were_written() -> None:
    """Attention over a cache of e4m3 that was appended to is that over its keys, within e4m3's rounding."""
    pools = [torch.zeros(6, 4, 2, 32).to(torch.float8_e4m3fn) for _ in "kv"]
    scales = KVScales(*(torch.ones(6, 4, 2) for _ in "kv"))
    q, k, v = (torch.randn(2, 2, 9, 32) for _ in range(3))
    paging = Paging(torch.randperm(6).view(2, 3).int(), torch.zeros(2, dtype=torch.int32))
    attn = fa4flex.compile(mask=fa4flex.variants.causal)
    fa4flex.append(1000 * k, 1000 * v, *pools, paging, kv_scales=scales, in_place=True)
    found = attn(q, *pools, paging=paging, kv_scales=scales, scale=1e-3 / 32**0.5)
    exact = attn(q, k, v)
    assert (found / 1000 - exact).abs().max() < 0.2 and (scales.k[paging.page_table] > 1).any()


def test_no_gradients_pass() -> None:
    given = drawn(How())
    with pytest.raises(UnsupportedError, match=r"no_grad"):
        replace(given, k=given.k.requires_grad_())()
    weighted = _with(norm=QKNorm(k=torch.ones(32, requires_grad=True)))
    with pytest.raises(UnsupportedError, match=r"weights of a norm"):
        weighted(drawn(How()))()
    with torch.no_grad():
        given()
