"""Appending latent rows to pages: as token by token in float64, in every format, and whatever is wrong is
told."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from latent_append_cases import FORMATS, HOWS, How, Rows, check_row, drawn, rounding, stored, token_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fa4flex
import ptxsim
from fa4flex import (
    InputError,
    KVScales,
    Latent,
    LatentFormat,
    Paging,
    QKNorm,
    Rotary,
    UnsupportedError,
    reference,
)
from fa4flex.primitives.latent import Segment
from fa4flex.runtime import latent_append
from fa4flex.variants import causal


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", HOWS)
def test_append(name: str, form: str) -> None:
    drawn(replace(HOWS[name], format=form)).check()


@pytest.mark.parametrize("form", FORMATS)
def test_any_lengths_and_dtypes(form: str) -> None:
    for _ in range(4):
        dtype = random.choice([torch.float32, torch.float16, torch.bfloat16])
        how = replace(random.choice(list(HOWS.values())), page_size=random.randint(1, 9), dtype=dtype)
        before, new = (tuple(random.randint(0, 20) for _ in range(4)) for _ in range(2))
        drawn(replace(how, format=form), before, (1, *new[1:])).check()


class Unread(TorchDispatchMode):
    """Refuses operators for which the host would wait for a device, and counts the others."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        waits = ("_local_scalar_dense", "nonzero", "repeat_interleave.Tensor", "masked_select", "aten.equal")
        assert not any(x in name for x in waits), name
        indices = args[1] if name.startswith(("aten.index.", "aten.index_put")) else ()
        assert not any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in indices), name
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> Unread:
    """The mode, around what the operator computes: it hides its own operations from modes."""
    mode = Unread()

    def computed(*given: Any) -> Any:
        with mode:
            return latent_append.append_latent(*latent_append.arguments_of(*given))

    monkeypatch.setattr("fa4flex.appending.by_operator", computed)
    return mode


@pytest.mark.parametrize("form", FORMATS)
def test_on_a_device(form: str, unread: Unread) -> None:
    """The same where the host may read nothing."""
    for name in random.sample(list(HOWS), 3):
        given = drawn(replace(HOWS[name], format=form))
        with ptxsim.device("sm_90a"):
            found = given(in_place=True)
        assert unread.count > 20
        fa4flex.synchronize()
        assert torch.equal(found.seqused_k, given.paging.seqused_k)
        given.paging.seqused_k.sub_(torch.tensor([len(x) for x in given.taken]).to(found.seqused_k.dtype))
        for page, slot, row in given.exact():
            check_row(given.how, given.latent, row, page, slot)


def test_lengths_in_place_and_none() -> None:
    given = drawn(How(format="v3.2"))
    before = given.paging.seqused_k.clone()
    found = given(in_place=True)
    assert torch.equal(given.paging.seqused_k, found.seqused_k) and (found.seqused_k == before + 5).all()
    assert found.q is None and found.gate is None
    found = fa4flex.append(given.rows[:, :, :0], given.latent, paging=given.paging)
    assert torch.equal(given.paging.seqused_k, found.seqused_k)


@pytest.mark.parametrize("form", FORMATS)
def test_what_was_appended_is_attended_to(form: str) -> None:
    """Rotated and appended in chunks, and attended to by rotated queries, as if all had been there.

    The result is the oracle's over what the bytes stand for; over rows that were not rounded it is as far off
    as their rounding may move scores and values.
    """
    how = How(format=form, turning=64, interleaved=True, norm="k", q_width=512 if form == "v4" else 576)
    given = drawn(replace(how, dtype=torch.float32), (0, 0), (9, 9))
    q, scale, outs = given.options["q"], 192**-0.5, []
    rows = given.exact()
    queries = given.queries()
    attn = fa4flex.compile(mask=causal, scale=scale)
    for part in (slice(0, 4), slice(4, 5), slice(5, 9)):
        options = {**given.options, "q": q[:, :, part]}
        new = fa4flex.append(given.rows[:, :, part], given.latent, given.paging, **options, in_place=True)
        held = given.latent if form != "plain" else replace(given.latent, cache=given.latent.cache.double())
        assert new.q is not None
        outs.append(attn(new.q.double(), held, paging=given.paging))
    out = torch.cat(outs, 2)
    kept = torch.stack([stored(how, given.latent, page, slot)[0] for page, slot, _ in rows])
    exact = torch.stack([row for *_, row in rows])
    bound = torch.stack([rounding(replace(how, dtype=torch.float32), row) for row in exact])
    for b in range(2):
        mine = slice(9 * b, 9 * b + 9)
        truths = [oracle(queries[b : b + 1], x[mine], scale) for x in (kept, exact)]
        assert (out[b : b + 1] - truths[0]).abs().max() <= 1e-5 * truths[0].abs().max()
        off = (queries[b].abs() @ bound[mine].T).max() * scale  # of a score
        values = bound[mine, :512].max(), exact[mine, :512].abs().max()
        assert (out[b : b + 1] - truths[1]).abs().max() <= torch.expm1(2 * off) * values[1] + 2 * values[0]


def oracle(q: Tensor, rows: Tensor, scale: float) -> Tensor:
    k = rows[None, None]
    out: Tensor = reference.attention(q, k, k[..., :512].clone(), None, causal, scale=scale)[0]
    return out


# --- formats ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [x for x in FORMATS if x != "plain"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_encoded_is_the_inverse_of_decoded(form: str, dtype: torch.dtype) -> None:
    """Rows of bytes and back, whose bytes are read one by one; and once more, which changes nothing."""
    how, made = How(format=form), FORMATS[form]
    assert made is not None
    scale = torch.tensor(0.0625) if form == "per tensor" else None
    rows = (torch.randn(3, 4, 1, how.width) * 8 ** torch.randn(3, 4, 1, 1)).to(dtype)
    cache = made.encoded(rows, scale)
    latent = Latent(cache, 512, 64, made, scale)
    for page in range(3):
        for slot in range(4):
            check_row(how, latent, rows[page, slot, 0].double(), page, slot)
    again = made.decoded(cache, torch.float64, scale)
    torch.testing.assert_close(made.decoded(made.encoded(again, scale), torch.float64, scale), again)


def test_scales_of_powers_of_two_are_the_smallest() -> None:
    """At 448 of a scale, and a little above; and the ends of what e8m0 holds."""
    form = LatentFormat.DEEPSEEK_V4
    above = float(torch.nextafter(torch.tensor(448.0), torch.tensor(torch.inf)))
    cases = {
        448.0: 127, above: 128, 224.0: 126, 449 / 2: 127, 0.0: 127, 448 * 2.0**-127: 0, 2.0**-140: 0,
        3e38: 247, torch.inf: 255, torch.nan: 255,
    }  # fmt: skip
    for largest, byte in cases.items():
        rows = torch.zeros(1, 1, 1, 512)
        rows[..., 5] = -largest
        cache = form.encoded(rows)
        assert cache[0, 0, 0, 576:].tolist() == [byte, *[127] * 6, 0], largest
        held = form.decoded(cache, torch.float32)[0, 0, 0]
        if byte == 255:
            assert held[:64].isnan().all() and (held[64:] == 0).all()
        else:
            assert abs(held[5] + largest) <= max(largest / 16, 2.0**-137)


def test_float32_scales() -> None:
    form = LatentFormat.DEEPSEEK_V3_2
    rows = torch.randn(1, 5, 1, 576)
    rows[0, 0, 0, :128], rows[0, 1, 0, 3], rows[0, 2, 0, 3] = 0, torch.inf, torch.nan
    rows[0, 3, 0, :128] = 0
    rows[0, 3, 0, 7] = 2.0**-149  # the smallest number: a 448th of it is 0
    scales = form.encoded(rows)[0, :, 0, 512:528].contiguous().view(torch.float32)
    exact = rows[0, :, 0, :512].view(5, 4, 128).abs().amax(-1) / 448
    assert scales[0, 0] == 1 and scales[1:3, 0].isnan().all() and scales[3, 0] > 0
    torch.testing.assert_close(scales[:, 1:], exact[:, 1:], rtol=1e-6, atol=0)
    held = form.decoded(form.encoded(rows), torch.float32)
    assert (held[0, 0, 0, :128] == 0).all() and held[0, 1:3, 0, :128].isnan().all()
    assert held[0, 3].isfinite().all()


def test_a_format_of_ones_own() -> None:
    """16 bits with scales: only what float16 cannot hold is scaled."""
    segments = (
        Segment(torch.float16, 8, torch.float32, 4),
        Segment(torch.float16, 4, torch.float8_e8m0fnu, 2),
        Segment(torch.bfloat16, 2, torch.float32, 2),
        Segment(torch.float8_e4m3fn, 2),
    )
    form = LatentFormat(segments, pad=3)
    rows = torch.randn(2, 3, 1, 16)
    rows[0, 0, 0, 4], rows[0, 0, 0, 10], rows[0, 0, 0, 14] = 2e5, 2e5, 1e5
    cache = form.encoded(rows)
    held = form.decoded(cache, torch.float32)
    assert cache.shape == (2, 3, 1, form.row_bytes) and (cache[..., -3:] == 0).all()
    assert held[0, 0, 0, 14] == 448
    held[0, 0, 0, 14] = rows[0, 0, 0, 14]
    of_float32 = cache[..., 16:24].contiguous().view(torch.float32)[..., 0, :]
    assert of_float32[0, 0, 1] > 3 and (of_float32.flatten()[2:] == 1).all()
    assert cache[..., 32:34].flatten().tolist() == [127, 129, *[127] * 10], "2e5 / 65504 is 3.05"
    torch.testing.assert_close(held[..., :12], rows[..., :12], rtol=2**-11, atol=4 * 2**-11)
    torch.testing.assert_close(held[1:, ..., :12], rows[1:, ..., :12], rtol=2**-11, atol=1e-6)
    torch.testing.assert_close(held[..., 12:14], rows[..., 12:14], rtol=2**-8, atol=0)
    torch.testing.assert_close(held[..., 14:], rows[..., 14:], rtol=2**-4, atol=2**-10)


def test_elements_that_pass_448() -> None:
    """Without a scale of their own: infinities, too."""
    form = LatentFormat.PER_TENSOR
    rows = torch.tensor([torch.inf, -torch.inf, 500.0, -1e30, torch.nan, 1.0]).repeat(96).view(1, 1, 576)
    held = form.decoded(form.encoded(rows), torch.float32)[0, 0, :6]
    assert held[[0, 1, 2, 3, 5]].tolist() == [448, -448, 448, -448, 1] and held[4].isnan()


def test_rows_that_do_not_fit_a_format() -> None:
    form = LatentFormat.DEEPSEEK_V3_2
    for rows in (torch.zeros(2, 1, 512), torch.zeros(2, 576), torch.zeros(2, 1, 576, dtype=torch.int32)):
        with pytest.raises(InputError, match=r"floats \[..., 1, 576\]"):
            form.encoded(rows)


# --- torch.compile ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS)
def test_inside_torch_compile(form: str) -> None:
    """The operator's mutation is seen: pages are written when the graph runs, and read after that."""
    given = drawn(How(format=form, turning=64, interleaved=True, norm="k", q_width=192))
    alone, latent = given.latent.cache.clone(), given.latent

    def step(rows: Tensor, cache: Tensor, table: Tensor, used: Tensor, q: Tensor) -> Any:
        new = fa4flex.append(
            rows, replace(latent, cache=cache), Paging(table, used), **{**given.options, "q": q}
        )
        return new.seqused_k, new.q, cache.view(torch.uint8).clone()

    table, used = given.paging.page_table, given.paging.seqused_k
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    lengths, q, seen = compiled(given.rows, alone, table, used, given.options["q"])
    found = given()
    same = given.latent.cache.view(torch.uint8)
    assert torch.equal(alone.view(torch.uint8), same) and torch.equal(seen, same)
    assert torch.equal(lengths, found.seqused_k) and torch.equal(q, found.q)


def test_the_operator_is_registered_right() -> None:
    given = drawn(How(turning=64, q_width=192, dtype=torch.float32))
    rotary, cache = given.options["rotary"], torch.zeros_like(given.latent.cache)
    one = (
        given.rows, cache, given.paging.page_table, given.paging.seqused_k, None, None,
        rotary.cos, rotary.sin, True, None, given.options["q"], None, None, None, 0.0, False,
        512, 64, None, None,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.fa4flex.append_latent.default, one)


# --- what is wrong ----------------------------------------------------------------------------------------


def _length(given: Rows, value: int) -> Rows:
    given.paging.seqused_k[1] = value
    return given


def _page(given: Rows, value: int) -> Rows:
    given.paging.page_table[1, 0] = value
    return given


def _ends(given: Rows, place: int, value: int) -> Rows:
    given.options["varlen"].cu_seqlens_q[place] = value
    return given


def _used(given: Rows, value: int) -> Rows:
    given.options["varlen"].seqused_q[1] = value
    return given


def _position(given: Rows, value: int) -> Rows:
    given.options["positions"][..., 1, 0] = value
    return given


def _axis(given: Rows, value: int) -> Rows:
    given.options["rotary"].axes[2] = value
    return given


WRONG: dict[str, tuple[Callable[[Rows], Rows], How, str]] = {
    "negative length": (lambda x: _length(x, -1), How(), "seqused_k of -1"),
    "past the table": (lambda x: _length(x, 22), How(), "seqused_k of 22 and 5 tokens to append"),
    "no page": (lambda x: _page(x, -3), How(), "page -3 in the page table"),
    "page past the pool": (lambda x: _page(x, 99), How(), "page 99 in the page table"),
    "ends": (lambda x: _ends(x, 3, 9), How(packed=True), "cu_seqlens_q ends at 9"),
    "decreases": (lambda x: _ends(x, 2, 1), How(packed=True), "cu_seqlens_q decreases"),
    "more used than there are": (lambda x: _used(x, 9), How(part=True), "seqused_q"),
    "fewer used than none": (lambda x: _used(x, -2), How(part=True, packed=True), "seqused_q"),
    "no angles": (
        lambda x: replace(x, options={"rotary": Rotary(torch.ones(6, 4), torch.ones(6, 4))}),
        How(),
        "position 16",
    ),
    "position below 0": (lambda x: _position(x, -1), How(turning=16, axes=0), "position"),
    "position of an axis": (lambda x: _position(x, 99), How(turning=16, axes=3), "position 99"),
    "no such axis": (lambda x: _axis(x, 3), How(turning=16, axes=3), "axis 3 of an angle"),
}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_contents_write_nothing(name: str, form: str) -> None:
    plant, how, message = WRONG[name]
    given = plant(drawn(replace(how, format=form)))
    before = given.latent.cache.view(torch.uint8).clone()
    with pytest.raises(InputError, match=message):
        given()
    assert torch.equal(given.latent.cache.view(torch.uint8), before)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_contents_are_told_by_the_next_call_on_a_device(name: str, unread: Unread) -> None:
    """Rows that have a place are written, nothing else is, and indices of none are read."""
    plant, how, _ = WRONG[name]
    form = random.choice(list(FORMATS))
    given = drawn(replace(how, format=form, page_size=4))
    table, exact = given.paging.page_table.clone(), given.exact()
    before = given.latent.cache.view(torch.uint8).clone()
    given = plant(given)
    with ptxsim.device("sm_90a"):
        found = given()
    assert unread.count > 20
    with pytest.raises(InputError, match="in contents given before this call"):
        fa4flex.synchronize()
    fa4flex.synchronize()
    assert (found.seqused_k >= 0).all() and (found.seqused_k <= table.shape[1] * 4).all()
    after = given.latent.cache.view(torch.uint8)
    changed = {(int(page), int(slot)) for page, slot in ((after != before).any(-1)[..., 0]).nonzero()}
    if form == "v4":
        changed = {(page, 0) for page, _ in changed}
    whole = {(page, slot if form != "v4" else 0) for page, slot, _ in exact}
    if name == "past the table":
        whole |= {(int(table[1, -1]), slot) for slot in range(4)}
    assert changed <= whole
    if name in ("negative length", "past the table", "no page", "page past the pool"):
        for page, slot, row in exact:
            if page in table[0]:
                check_row(given.how, given.latent, row, page, slot)
    else:
        assert not changed or name in ("position below 0", "position of an axis", "no angles")


def test_the_next_call_itself_tells() -> None:
    given, other = _page(drawn(How(format="v3.2")), 99), drawn(How())
    with ptxsim.device("sm_90a"):
        given()
        with pytest.raises(InputError, match="page that does not exist"):
            other()
        other()


def test_validation_refuses_the_call_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fa4flex.contents.VALIDATE", True)
    given = _length(drawn(How(format="v3.2")), -3)
    with ptxsim.device("sm_90a"), pytest.raises(InputError, match="seqused_k of -3"):
        given()


def _with(**options: Any) -> Callable[[Rows], Rows]:
    return lambda x: replace(x, options=options)


def _latent(change: Callable[[Tensor], Tensor], **fields: Any) -> Callable[[Rows], Rows]:
    return lambda x: replace(x, latent=replace(x.latent, cache=change(x.latent.cache), **fields))


_ROTARY = Rotary(torch.ones(40, 4), torch.ones(40, 4))
REFUSED: dict[str, tuple[Callable[[Rows], Rows], str]] = {
    "another width": (lambda x: replace(x, rows=x.rows[..., 1:]), r"rows \[B, 1, S, 576\]"),
    "another dtype": (lambda x: replace(x, rows=x.rows.double()), "floats of torch.bfloat16"),
    "tokens first": (lambda x: replace(x, rows=x.rows.transpose(1, 2)), r"rows.transpose\(1, 2\)"),
    "packed without lengths": (lambda x: replace(x, rows=x.rows[0].transpose(0, 1)), "cu_seqlens"),
    "another batch": (lambda x: replace(x, rows=x.rows[:2]), "2 sequences of new keys"),
    "packed cache": (_latent(lambda x: x.flatten(0, 1)), "packed latent rows"),
    "q alone": (_with(q=torch.zeros(3, 2, 5, 576)), "q without rotary"),
    "narrow q": (_with(q=torch.zeros(3, 2, 5, 32), rotary=_ROTARY), "last 64 columns are rotated"),
    "q of other tokens": (_with(q=torch.zeros(3, 2, 4, 64).bfloat16(), rotary=_ROTARY), "of the tokens"),
    "q of another dtype": (_with(q=torch.zeros(3, 2, 5, 64), rotary=_ROTARY), "width and dtype"),
    "too many angles": (_with(rotary=Rotary(torch.ones(40, 33), torch.ones(40, 33))), "33 angles"),
    "weights of whole rows": (_with(norm=QKNorm(k=torch.ones(576))), "k weights of 576 elements"),
    "weights of no queries": (_with(norm=QKNorm(q=torch.ones(32))), "weights of q without q"),
    "weights of wider queries": (
        _with(norm=QKNorm(q=torch.ones(512)), q=torch.zeros(3, 2, 5, 576).bfloat16()),
        "q weights of 512",
    ),
    "positions alone": (_with(positions=torch.zeros(3, 5, dtype=torch.int32)), "positions without rotary"),
    "scales": (_with(kv_scales=KVScales()), "kv_scales= beside a fa4flex.Latent"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    plant, message = REFUSED[name]
    with pytest.raises((InputError, UnsupportedError), match=message):
        plant(drawn(How()))()


def test_refused_of_formats_and_calls() -> None:
    given = drawn(How(format="v4"))
    form = LatentFormat.DEEPSEEK_V4
    apart = torch.zeros(14, 4, 2, 584, dtype=torch.uint8)[:, :, :1]
    with pytest.raises(UnsupportedError, match="scales behind the rows of a page"):
        fa4flex.append(given.rows, Latent(apart, 512, 64, form), given.paging)
    with pytest.raises(InputError, match="floats of 16 bits or more"):
        fa4flex.append(given.rows.to(torch.float8_e4m3fn), given.latent, given.paging)
    with pytest.raises(InputError, match="paging is a NoneType"):
        fa4flex.append(given.rows, given.latent)
    pool = torch.zeros(1)
    for more in ((pool, pool, given.paging), (given.paging, None, given.paging)):
        with pytest.raises(UnsupportedError, match="pools beside"):
            fa4flex.append(given.rows, given.latent, *more)
    with pytest.raises(InputError, match="k_pool is a NoneType"):
        fa4flex.append(given.rows, given.rows, paging=given.paging)


def test_no_gradients_pass() -> None:
    given = drawn(How(format="v3.2"))
    with pytest.raises(UnsupportedError, match=r"no_grad"):
        replace(given, rows=given.rows.clone().requires_grad_())()
    weighted = replace(given, options={"norm": QKNorm(k=torch.ones(512, requires_grad=True))})
    with pytest.raises(UnsupportedError, match=r"weights of a norm"):
        weighted()
    with torch.no_grad():
        weighted()


def test_padded_caches_are_pages() -> None:
    """A cache [B, S, 1, width] is a pool whose page b is sequence b."""
    rows, cache = torch.randn(2, 1, 3, 576), torch.zeros(2, 7, 1, 576)
    paging = Paging(torch.arange(2)[:, None], torch.tensor([4, 0]))
    fa4flex.append(rows, Latent(cache), paging)
    assert torch.equal(cache[0, 4:, 0], rows[0, 0]) and torch.equal(cache[1, :3, 0], rows[1, 0])
    assert not cache[0, :4].any() and not cache[1, 3:].any()


def test_rows_of_a_token() -> None:
    """token_of's two arrangements hold the same columns."""
    x = torch.randn(2, 1, 3, 8)
    assert torch.equal(token_of(x, (1, 2)), token_of(x.transpose(1, 2).flatten(0, 1), 5))
