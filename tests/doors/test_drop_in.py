"""fa4flex.flex_attention beside torch's: options, dtypes, empty inputs, layouts, words of errors."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

import fa4flex
from fa4flex import Fa4flexError, InputError, UnsupportedError, api, drop_in
from fa4flex.primitives import blocks
from fa4flex.runtime.cpu.tiles import Walk
from fa4flex.variants import alibi, causal

BF16, HALF, FLOAT, DOUBLE = torch.bfloat16, torch.float16, torch.float32, torch.float64


def qkv(
    batch: int = 2, heads: int = 2, q_len: int = 16, kv_len: int = 16, grad: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    sizes = (batch, heads, q_len, 8), (batch, heads, kv_len, 8), (batch, heads, kv_len, 8)
    return tuple(torch.randn(size, requires_grad=grad) for size in sizes)  # type: ignore[return-value]


def causal_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def relative(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + 0.1 * (q_idx - kv_idx)


def compiled(function: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True, **options)


@pytest.fixture
def torch_eager() -> Iterator[Any]:
    """torch's own function, which runs without its compiler and its device check."""
    check = torch_flex._validate_device
    torch_flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    torch_flex._validate_device = lambda *_: None  # type: ignore[assignment]
    try:
        yield torch_flex.flex_attention
    finally:
        torch_flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = False
        torch_flex._validate_device = check


@pytest.fixture
def unwarned() -> Iterator[None]:
    shown = set(torch_flex._WARNINGS_SHOWN)
    torch_flex._WARNINGS_SHOWN.clear()
    yield
    torch_flex._WARNINGS_SHOWN.clear()
    torch_flex._WARNINGS_SHOWN.update(shown)


def test_one_function_under_both_names() -> None:
    assert fa4flex.flex_attention is api.flex_attention is drop_in.flex_attention
    q, k, v = qkv()
    wanted = fa4flex.flex_attention(q, k, v)
    for function in (lambda: fa4flex.flex_attention(q, k, v), lambda: api.flex_attention(q, k, v)):
        torch.testing.assert_close(compiled(function)(), wanted)


# --- kernel_options ---------------------------------------------------------------------------------------

TUNING = [
    {"num_warps": 4, "num_stages": 2},
    {"BLOCK_M": 64},
    {"fwd_BLOCK_M": 64, "bwd_BLOCK_M1": 32, "bwd_num_warps": 2},
    {"PRESCALE_QK": True, "ROWS_GUARANTEED_SAFE": True, "BLOCKS_ARE_CONTIGUOUS": True, "WRITE_DQ": False},
    {"FORCE_USE_FLEX_ATTENTION": True, "USE_TMA": True, "SPLIT_KV": 2, "PARTITION_SIZE": 64},
    {"kpack": 2, "matrix_instr_nonkdim": 16, "waves_per_eu": 0},
    {"num_consumer_groups": 2, "num_buffers_warp_spec": 3},
    {"BACKEND": "TRITON"},
    {"FLOAT32_PRECISION": "'ieee'", "SKIP_MASK_SCORE": False},
]


@pytest.mark.parametrize("options", TUNING, ids=lambda x: next(iter(x)))
def test_options_that_tune_torch_s_kernels_change_nothing(options: dict[str, Any]) -> None:
    q, k, v = qkv()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = fa4flex.flex_attention(q, k, v, relative, kernel_options=options)
        traced = compiled(fa4flex.flex_attention)(q, k, v, relative, kernel_options=options)
    wanted = fa4flex.flex_attention(q, k, v, relative)
    torch.testing.assert_close(found, wanted, atol=0, rtol=0)
    torch.testing.assert_close(traced, wanted)


@pytest.mark.usefixtures("unwarned")
def test_such_options_give_one_warning() -> None:
    q, k, v = qkv()
    with pytest.warns(UserWarning, match="num_warps: ignored, as they only tune kernels of torch"):
        fa4flex.flex_attention(q, k, v, kernel_options={"num_warps": 4})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fa4flex.flex_attention(q, k, v, kernel_options={"num_stages": 4})
        fa4flex.flex_attention(q, k, v, kernel_options={"BLOCK_M": 8, "BLOCK_N": 4})


@pytest.mark.usefixtures("unwarned")
def test_such_options_give_a_warning_while_compiling() -> None:
    q, k, v = qkv()
    with pytest.warns(UserWarning, match="num_warps: ignored"):
        compiled(fa4flex.flex_attention)(q, k, v, kernel_options={"num_warps": 4})


def test_both_block_sizes_set_the_tile() -> None:
    assert drop_in._schedule({"BLOCK_M": 8, "BLOCK_N": 4}, False).tile == (8, 4)
    q, k, v = qkv()
    found = compiled(fa4flex.flex_attention, dynamic=True)(
        q, k, v, kernel_options={"BLOCK_M": 8, "BLOCK_N": 4}
    )
    torch.testing.assert_close(found, fa4flex.flex_attention(q, k, v))
    with pytest.raises(InputError, match=r"(?s)tile=.*two positive ints"):
        fa4flex.flex_attention(*qkv(), kernel_options={"BLOCK_M": 0, "BLOCK_N": 4})


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"BACKEND": "MINE"}, ValueError, r"Invalid BACKEND value 'MINE'. Must be one of \('AUTO', 'TRITON'"),
    (
        {"BACKEND": "AUTO", "FORCE_USE_FLEX_ATTENTION": True},
        RuntimeError,
        "BACKEND cannot be combined with legacy FORCE_USE_FLEX_ATTENTION",
    ),
    ({"OUTPUT_LOGSUMEXP": True}, AssertionError, "OUTPUT_LOGSUMEXP must not be in kernel_options"),
    ({"OUTPUT_MAX": True}, AssertionError, "OUTPUT_MAX must not be in kernel_options"),
    ({"BACKEND": "FLASH"}, NotImplementedError, "max scores is not supported with BACKEND='FLASH'"),
    ({"FLOAT32_PRECISION": "'tf32'"}, UnsupportedError, "FLOAT32_PRECISION.*changes results"),
    ({"SKIP_MASK_SCORE": True}, UnsupportedError, "SKIP_MASK_SCORE.*changes results"),
    ({"num_warp": 4}, UnsupportedError, "(?s)'num_warp', which torch does not know.*mean 'num_warps'"),
    ({"fwd_block_m": 4}, UnsupportedError, "(?s)fwd_block_m.*did you mean 'BLOCK_M'"),
    ({"FOO": 1}, UnsupportedError, "(?s)FOO.*leave it out"),
]


@pytest.mark.parametrize(("options", "kind", "words"), REFUSED, ids=lambda x: str(x)[:24])
def test_options_that_cannot_be_honoured(options: dict[str, Any], kind: type[Exception], words: str) -> None:
    q, k, v = qkv()
    with pytest.raises(kind, match=words) as caught:
        fa4flex.flex_attention(q, k, v, kernel_options=options, return_aux=AuxRequest(max_scores=True))
    assert isinstance(caught.value, Fa4flexError)


# --- return_lse -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unwarned")
def test_return_lse_warns_once_as_torch_does() -> None:
    q, k, v = qkv()
    with pytest.warns(FutureWarning, match="return_lse is deprecated.*use return_aux=AuxRequest"):
        fa4flex.flex_attention(q, k, v, return_lse=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fa4flex.flex_attention(q, k, v, return_lse=True)
    with pytest.raises(ValueError, match="Cannot specify both return_lse and return_aux"):
        fa4flex.flex_attention(q, k, v, return_lse=True, return_aux=AuxRequest(lse=True))


# --- dtypes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, HALF])
@pytest.mark.parametrize("kinds", [(FLOAT, FLOAT, FLOAT), (FLOAT, BF16, HALF), (DOUBLE, FLOAT, FLOAT)])
def test_autocast_casts_as_torch_does(
    torch_eager: Any, dtype: torch.dtype, kinds: tuple[torch.dtype, ...]
) -> None:
    given = [x.to(kind) for x, kind in zip(qkv(), kinds, strict=True)]
    with torch.autocast("cpu", dtype=dtype):
        wanted, aux = torch_eager(*given, relative), AuxRequest(lse=True)
        found, statistics = fa4flex.flex_attention(*given, relative, return_aux=aux)
        traced = compiled(fa4flex.flex_attention)(*given, relative)
    precise = fa4flex.flex_attention(*[x.double() for x in given], relative)
    for out in (found, traced):
        assert out.dtype == wanted.dtype
        assert (out.double() - precise).norm() <= 2 * (wanted.double() - precise).norm() + 1e-6
    assert statistics.lse.dtype == (DOUBLE if kinds[0] == DOUBLE else FLOAT)


@pytest.mark.parametrize("where", ["eager", "aot_eager", "backend eager"])
def test_autocast_reaches_compiled_variants_and_their_gradients(where: str) -> None:
    """Autocast acts as on scaled_dot_product_attention: bfloat16 inside; gradients, scores, sums float32."""
    bias = torch.randn(2, requires_grad=True)
    attn = fa4flex.compile(lambda s, b, h, q, kv: s + bias[h] * torch.exp(0.01 * (q - kv)), causal)
    given = qkv(grad=True)
    backend = {"eager": None, "aot_eager": "aot_eager", "backend eager": "eager"}[where]
    torch._dynamo.reset()
    run = attn if backend is None else torch.compile(attn.__call__, backend=backend)
    with torch.autocast("cpu", dtype=BF16):
        out = run(*given)
    assert out.dtype == BF16
    found = torch.autograd.grad(out.float().sum(), (*given, bias))
    low = [x.detach().to(BF16).requires_grad_() for x in given]
    plain = attn(*low)
    torch.testing.assert_close(out, plain, atol=0, rtol=0)
    wanted = torch.autograd.grad(plain.float().sum(), (*low, bias))
    for x, y in zip(found, wanted, strict=True):
        assert x.dtype == FLOAT
        torch.testing.assert_close(x, y.float(), atol=0, rtol=0)


@pytest.mark.parametrize("kinds", [*itertools.permutations([BF16, HALF, FLOAT]), (DOUBLE, FLOAT, BF16)])
def test_mixed_dtypes_give_the_query_s(torch_eager: Any, kinds: tuple[torch.dtype, ...]) -> None:
    q, k, v = given = [x.to(kind) for x, kind in zip(qkv(), kinds, strict=True)]
    wanted = torch_eager(q, k, v, relative)
    precise = fa4flex.flex_attention(q.double(), k.double(), v.double(), relative)
    for out in (fa4flex.flex_attention(*given, relative), compiled(fa4flex.flex_attention)(*given, relative)):
        assert out.dtype == wanted.dtype == q.dtype
        assert (out.double() - precise).norm() <= 2 * (wanted.double() - precise).norm() + 1e-6


def test_mixed_dtypes_have_no_backward_pass() -> None:
    words = "Backward pass with mixed query, key, and value dtype is not supported"
    q, k, v = qkv(grad=True)
    out = fa4flex.flex_attention(q, k.to(BF16), v.to(BF16), relative)
    with pytest.raises(ValueError, match=words):
        out.sum().backward()
    told = torch.__version__ >= (2, 12)  # earlier ones name the exception that code raises, not its words
    with pytest.raises(Exception, match=words if told else "InputError"):
        compiled(fa4flex.flex_attention)(q, k.to(BF16), v.to(BF16), relative)
    with pytest.raises(InputError, match="mixed dtypes"):
        fa4flex.compile()(q, k.to(BF16), v)


# --- nothing to attend to ---------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["map", "mask"])
def test_maps_and_masks_of_this_library(what: str) -> None:
    """In place of a BlockMask, also where no mask was traced before."""
    classes = torch.tensor([[2, 0], [1, 2]], dtype=torch.uint8)
    given = fa4flex.BlockMap.from_dense(classes, 16) if what == "map" else fa4flex.variants.causal
    q, k, v = (torch.randn(1, 2, 32, 16) for _ in range(3))
    fa4flex.flex_attention(q, k, v)
    exact, _ = fa4flex.reference.attention(q, k, v, None, given.mask() if what == "map" else given)
    torch.testing.assert_close(
        fa4flex.flex_attention(q, k, v, block_mask=given).double(), exact, atol=1e-5, rtol=1e-5
    )


def test_the_block_mask_that_stands_for_none() -> None:
    q, k, v = qkv(q_len=20, kv_len=12)
    none = torch_flex._create_empty_block_mask(q, k)
    wanted = fa4flex.flex_attention(q, k, v)
    torch.testing.assert_close(fa4flex.flex_attention(q, k, v, block_mask=none), wanted, atol=0, rtol=0)
    torch.testing.assert_close(fa4flex.compile(mask=none)(q, k, v), wanted, atol=0, rtol=0)
    torch.testing.assert_close(
        fa4flex.compile(mask=causal & none)(q, k, v), fa4flex.compile(mask=causal)(q, k, v)
    )
    torch.testing.assert_close(compiled(fa4flex.flex_attention)(q, k, v, block_mask=none), wanted)
    some = fa4flex.BlockMap.from_dense(torch.tensor([[True, False]]), (20, 6), 20, 12)
    torch.testing.assert_close(fa4flex.compile(blocks=some)(q, k, v, blocks=none), wanted, atol=0, rtol=0)


@pytest.mark.parametrize("way", ["eager", "compiled"])
@pytest.mark.parametrize("sizes", [(0, 4, 4), (2, 0, 4), (2, 4, 0), (2, 0, 0)])
def test_empty_batches_and_sequences(sizes: tuple[int, int, int], way: str) -> None:
    batch, q_len, kv_len = sizes
    sinks = torch.zeros(2, requires_grad=True)
    for options in ({}, {"mask": causal}, {"score_mod": alibi}, {"sinks": sinks}):
        q, k, v = given = qkv(batch, 2, q_len, kv_len, grad=True)
        attn = fa4flex.compile(**options)
        run = attn if way == "eager" else compiled(lambda *x, attn=attn: attn(*x, return_lse=True))
        out, lse = run(q, k, v, return_lse=True) if way == "eager" else run(q, k, v)
        assert out.shape == (batch, 2, q_len, 8) and lse.shape == (batch, 2, q_len)
        assert torch.equal(out, torch.zeros_like(out))
        assert torch.equal(lse, torch.full_like(lse, 0.0 if "sinks" in options else -torch.inf))
        for x, gradient in zip(given, torch.autograd.grad(out.sum(), given), strict=True):
            assert gradient.shape == x.shape and not gradient.any()


# --- layouts ----------------------------------------------------------------------------------------------

B, H, T, D = 2, 4, 8, 16
LAYOUTS: dict[str, Tensor] = {
    "contiguous": torch.randn(B, H, T, D),
    "projection": torch.randn(B, T, H * D).view(B, T, H, D).transpose(1, 2),
    "one batch": torch.randn(1, T, H * D).view(1, T, H, D).transpose(1, 2),
    "one head": torch.randn(B, T, D).view(B, T, 1, D).transpose(1, 2),
    "one query": torch.randn(B, 1, H * D).view(B, 1, H, D).transpose(1, 2),
    "one token in all": torch.randn(1, 1, H * D).view(1, 1, H, D).transpose(1, 2),
    "interleaved": torch.empty_strided((2, 16, 8, 16), (2048, 128, 16, 1)).normal_(),
    "tokens of batches": torch.randn(T, B, H * D).view(T, B, H, D).permute(1, 2, 0, 3),
    "heads expanded": torch.randn(B, 1, T, D).expand(B, H, T, D),
    "batch expanded": torch.randn(1, H, T, D).expand(B, H, T, D),
    "all expanded": torch.randn(1, 1, T, D).expand(B, H, T, D),
    "channels outside": torch.randn(B, H, D, T).transpose(2, 3),
    "channels outermost": torch.randn(D, B, H, T).permute(1, 2, 3, 0),
    "a slice": torch.randn(B, T, 3, H, D)[:, :, 0].transpose(1, 2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_output_is_laid_out_as_torch_s(torch_eager: Any, name: str) -> None:
    q = LAYOUTS[name]
    k, v = torch.randn(2, *q.shape)
    wanted = torch_eager(q, k, v)
    found, traced = fa4flex.flex_attention(q, k, v), compiled(fa4flex.flex_attention)(q, k, v)
    with torch.inference_mode():
        inference = fa4flex.flex_attention(q, k, v)
    for out in (found, traced, inference):
        torch.testing.assert_close(out, wanted)
        assert out.stride() == wanted.stride()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("sizes", [(2, 8, 4), (1, 8, 4), (2, 1, 4), (2, 8, 1)])
def test_heads_are_merged_by_a_view(sizes: tuple[int, int, int], dynamic: bool) -> None:
    batch, tokens, heads = sizes

    def layer(x: Tensor) -> Any:
        q = x.view(batch, tokens, heads, D).transpose(1, 2)
        out = fa4flex.flex_attention(q, q, q)
        return out.transpose(1, 2).view(batch, tokens, heads * D)

    x = torch.randn(batch, tokens, heads * D, requires_grad=True)
    wanted = layer(x)
    found = compiled(layer, dynamic=dynamic)(x)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x) for y in (found, wanted)))


# --- block masks ------------------------------------------------------------------------------------------


def test_words_and_types_of_errors_about_block_masks() -> None:
    mask = create_block_mask(causal_mod, None, None, 32, 32, device="cpu", BLOCK_SIZE=16)
    for kind in (RuntimeError, ValueError, InputError):
        with pytest.raises(kind, match="block_mask was created for q_len=32"):
            fa4flex.flex_attention(*qkv(), block_mask=mask)
        with pytest.raises(kind, match="Cannot use mask_mod from a sliced BlockMask"):
            fa4flex.flex_attention(*qkv(), block_mask=mask[:, :, :1])


def test_keys_are_shared_by_the_batch() -> None:
    q, k, v = qkv()
    found = fa4flex.flex_attention(q, k[:1], v[:1])
    torch.testing.assert_close(found, fa4flex.flex_attention(q, k[:1].expand_as(k), v[:1].expand_as(v)))
    with pytest.raises(ValueError, match="batch sizes differ"):
        fa4flex.flex_attention(q[:1], k, v)


def test_a_block_mask_s_map_is_kept_until_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = create_block_mask(causal_mod, None, None, 64, 64, device="cpu", BLOCK_SIZE=16)
    q, k, v = qkv(q_len=64, kv_len=64)
    first = fa4flex.flex_attention(q, k, v, block_mask=mask)
    with monkeypatch.context() as patch:
        patch.setattr(blocks, "_map_of", lambda _: pytest.fail("the map was made anew"))
        torch.testing.assert_close(fa4flex.flex_attention(q, k, v, block_mask=mask), first, atol=0, rtol=0)
    mask.full_kv_num_blocks[..., -1] = 0  # the last rows lose all keys but those of the diagonal block
    expected = (causal_mod(0, 0, torch.arange(64)[:, None], torch.arange(64))).clone()
    expected[48:, :48] = False
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=expected)
    torch.testing.assert_close(fa4flex.flex_attention(q, k, v, block_mask=mask), wanted, atol=1e-5, rtol=1e-5)
    mask.full_kv_num_blocks = torch.zeros_like(mask.full_kv_num_blocks)  # another tensor
    expected &= torch.block_diag(*[torch.ones(16, 16)] * 4).bool()
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=expected)
    torch.testing.assert_close(fa4flex.flex_attention(q, k, v, block_mask=mask), wanted, atol=1e-5, rtol=1e-5)


def test_tile_maps_notice_changes_that_torch_does_not_count() -> None:
    ids = torch.zeros(64, dtype=torch.int64)
    attn = fa4flex.compile(mask=lambda b, h, q, kv: ids[q] == ids[kv])
    q, k, v = qkv(q_len=64, kv_len=64)
    attn(q, k, v)
    ids.numpy()[32:] = 1
    allowed = ids[:, None] == ids
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
    torch.testing.assert_close(attn(q, k, v), wanted, atol=1e-5, rtol=1e-5)


def test_host_time_of_a_call_with_a_known_block_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time around the scores: the BlockMask's map, the functions' trace, the classes of 32 x 32 tiles."""
    mask = create_block_mask(causal_mod, None, None, 4096, 4096, device="cpu", BLOCK_SIZE=128)
    q, k, v = (torch.randn(1, 1, 4096, width) for width in (1, 1, 2))  # of two widths: tile by tile
    monkeypatch.setattr(Walk, "__iter__", lambda _: iter(()))  # no tile is computed
    times = []
    for _ in range(10):
        start = time.process_time()
        fa4flex.flex_attention(q, k, v, block_mask=mask)
        times.append(time.process_time() - start)
    assert min(times) < 1e-3


# --- errors in code that torch.compile traces -------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda q, k, v: fa4flex.flex_attention(q, k[..., :4], v), "q and k differ in head_dim"),
        (lambda q, k, v: fa4flex.flex_attention(q, k[:, :1], v[:, :1]), "enable_gqa=True"),
        (lambda q, k, v: fa4flex.flex_attention(q, k, v, kernel_options={"FOO": 1}), "FOO"),
        (lambda q, k, v: fa4flex.compile(scale=1.0)(q[0], k, v), "ranks do not fit"),
    ],
)
def test_dynamo_shows_the_words_of_an_error(call: Any, words: str) -> None:
    with pytest.raises(Exception, match=words):
        compiled(call)(*qkv())
