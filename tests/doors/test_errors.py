"""Bad input: one clear error each, that says what was given, what is expected and what to do."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import fa4flex
from fa4flex import BlockMap, InputError, Paging, Schedule, Sinks, TraceError, UnsupportedError, Varlen
from fa4flex.variants import alibi, causal, sliding_window, softcap


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype)


def dense(b: int = 2, h: int = 4, s: int = 16, d: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    return rand(b, h, s, d), rand(b, h, s, d), rand(b, h, s, d)


def packed(tokens: int = 16, h: int = 4, d: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    return rand(tokens, h, d), rand(tokens, h, d), rand(tokens, h, d)


def nested_tensor() -> Tensor:
    """[2, 4, ragged, 8], as torch makes it of two sequences."""
    return torch.nested.nested_tensor([rand(3, 4, 8), rand(2, 4, 8)], layout=torch.jagged).transpose(1, 2)


def cu(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


plain = fa4flex.compile()
CALLS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "not a tensor": (lambda: plain([1.0], *dense()[1:]), InputError, "q is a list"),
    "wrong rank": (lambda: plain(*(x[0] for x in dense())), InputError, "ranks do not fit.*4-D tensors"),
    "packed without cu_seqlens": (lambda: plain(*packed()), InputError, "pass varlen= for packed"),
    "dtype mix": (
        lambda: plain(rand(1, 1, 4, 8), rand(1, 1, 4, 8).half(), rand(1, 1, 4, 8)),
        InputError,
        "mixed dtypes: q float32.*k float16",
    ),
    "nested tensors": (
        lambda: fa4flex.flex_attention(*[nested_tensor()] * 3),
        NotImplementedError,
        "flex_attention does not support NestedTensor inputs.*Varlen",
    ),
    "integer dtype": (lambda: plain(*(x.int() for x in dense())), UnsupportedError, "torch.int32.*bfloat16"),
    "device mix": (
        lambda: plain(rand(1, 1, 4, 8), rand(1, 1, 4, 8).to("meta"), rand(1, 1, 4, 8)),
        InputError,
        "Expected query, key, and value to have the same device type, but got "
        "query.device: cpu, key.device: meta, and value.device: cpu instead.",
    ),
    "other device": (
        lambda: plain(*(x.to("meta") for x in dense())),
        UnsupportedError,
        "tensors on meta.*CPU tensors",
    ),
    "head ratio": (
        lambda: plain(rand(1, 6, 4, 8), rand(1, 4, 4, 8), rand(1, 4, 4, 8)),
        InputError,
        "6 query heads with 4 KV heads.*multiple",
    ),
    "k and v heads": (
        lambda: plain(rand(1, 4, 4, 8), rand(1, 4, 4, 8), rand(1, 3, 4, 8)),
        InputError,
        "4 query heads with 3 heads of values.*multiple",
    ),
    "head dim": (
        lambda: plain(rand(1, 1, 4, 8), rand(1, 1, 4, 16), rand(1, 1, 4, 16)),
        InputError,
        "differ in head_dim",
    ),
    "key lengths": (
        lambda: plain(rand(1, 1, 4, 8), rand(1, 1, 5, 8), rand(1, 1, 6, 8)),
        InputError,
        "differ in length",
    ),
    "batch": (
        lambda: plain(rand(2, 1, 4, 8), rand(1, 1, 4, 8), rand(1, 1, 4, 8)),
        InputError,
        "batch sizes differ",
    ),
    "empty tensor": (lambda: plain(*dense(d=0)), InputError, "an empty tensor.*one channel"),
    "no heads": (lambda: plain(*dense(h=0)), InputError, "an empty tensor"),
    "NaN scale": (lambda: fa4flex.compile(scale=math.nan), InputError, "scale=nan.*finite"),
    "infinite scale": (lambda: fa4flex.compile(scale=math.inf), InputError, "scale=inf"),
    "layout": (lambda: fa4flex.compile(layout="sbhd"), InputError, "layout='sbhd'.*bshd"),
    "unknown option": (
        lambda: fa4flex.compile(window=3),
        TypeError,
        "window.*score_mod.*leave window=",
    ),
    "option of torch": (
        lambda: fa4flex.compile(mask_mod=causal),
        InputError,
        "options mask_mod.*write mask= for mask_mod=",
    ),
    "cu_seqlens decreases": (
        lambda: plain(*packed(), varlen=Varlen(cu(0, 9, 4, 16))),
        InputError,
        "decreases after entry 1: 9 to 4",
    ),
    "cu_seqlens starts late": (lambda: Varlen(cu(1, 16)), InputError, "starts at 1"),
    "cu_seqlens too short": (
        lambda: plain(*packed(), varlen=Varlen(cu(0, 4, 12))),
        InputError,
        "ends at 12, q has 16 tokens",
    ),
    "cu_seqlens float": (lambda: Varlen(torch.tensor([0.0, 16.0])), InputError, "float32.*int32 or int64"),
    "cu_seqlens count": (lambda: Varlen(cu(0, 16), cu(0, 8, 16)), InputError, "one number of sequences"),
    "seqused too long": (
        lambda: plain(*dense(), varlen=Varlen(seqused_k=cu(16, 17))),
        InputError,
        "up to 17 for a length of 16",
    ),
    "varlen with dense tensors": (
        lambda: plain(*dense(), varlen=Varlen(cu(0, 16))),
        InputError,
        "packed 3-D tensors",
    ),
    "page out of range": (
        lambda: plain(
            rand(1, 2, 3, 8), rand(4, 5, 2, 8), rand(4, 5, 2, 8), paging=Paging(cu(0, 4).view(1, 2), cu(10))
        ),
        InputError,
        "page 4 in the page table.*0 to 3",
    ),
    "pages too few": (
        lambda: plain(
            rand(1, 2, 3, 8), rand(4, 5, 2, 8), rand(4, 5, 2, 8), paging=Paging(cu(0, 1).view(1, 2), cu(11))
        ),
        InputError,
        "seqused_k of 11 tokens.*= 10",
    ),
    "page table batch": (
        lambda: plain(
            rand(2, 2, 3, 8), rand(4, 5, 2, 8), rand(4, 5, 2, 8), paging=Paging(cu(0, 1).view(1, 2), cu(10))
        ),
        InputError,
        "2 sequences of queries, 1 in the page table",
    ),
    "block map shape": (
        lambda: BlockMap.from_dense(torch.ones(2, 3, dtype=torch.bool), 8, 16, 16),
        InputError,
        r"map of \[2, 3\] blocks.*\[2, 2\] blocks",
    ),
    "block map for other lengths": (
        lambda: fa4flex.compile(blocks=BlockMap.from_dense(torch.ones(2, 2, dtype=torch.bool), 16))(*dense()),
        InputError,
        "q_len=32, kv_len=32, but got q_len=16, kv_len=16",
    ),
    "block map for other heads": (
        lambda: fa4flex.compile(blocks=BlockMap.from_dense(torch.ones(3, 2, 2, dtype=torch.bool), 8))(
            *dense()
        ),
        InputError,
        "3 heads for inputs with 4",
    ),
    "block index out of range": (
        lambda: BlockMap.from_counts(cu(1, 1).view(1, 1, 2), cu(0, 2).view(1, 1, 2, 1), 8, 16, 16),
        InputError,
        "key block 2 in indices.*0 to 1",
    ),
    "short block map with varlen": (
        lambda: fa4flex.compile(blocks=BlockMap.from_dense(torch.ones(2, 2, dtype=torch.bool), 4))(
            *packed(), varlen=Varlen(cu(0, 16))
        ),
        InputError,
        "a sequence of 16 tokens with a block map of q_len=8",
    ),
    "two masks": (
        lambda: fa4flex.compile(
            mask=causal,
            blocks=create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 128, device="cpu"),
        ),
        InputError,
        "BlockMask that has its own mask_mod",
    ),
    "mask arity": (lambda: fa4flex.compile(mask=lambda q, kv: q >= kv), TraceError, "mask_mod"),
    "score arity": (lambda: fa4flex.compile(lambda s, q, kv: s), TraceError, "score_mod"),
    "mask not callable": (
        lambda: fa4flex.compile(mask=torch.ones(3, 3)),
        InputError,
        "given as a mask.*lambda",
    ),
    "score not callable": (lambda: fa4flex.compile(3.0), InputError, "given as a score_mod"),
    "sinks per head": (lambda: fa4flex.compile(sinks=torch.zeros(3))(*dense()), InputError, "3 sinks for 4"),
    "sinks dtype": (lambda: Sinks(torch.zeros(4, dtype=torch.int32)), InputError, "sinks of torch.int32"),
    "tile": (lambda: Schedule(tile=(0, 128)), InputError, r"tile=\(0, 128\)"),
    "window": (lambda: sliding_window(0), InputError, "window"),
    "captured tensor elsewhere": (
        lambda: fa4flex.compile(lambda s, b, h, q, k, t=torch.zeros(4, device="meta"): s + t[h])(*dense()),
        InputError,
        "captured tensor.*on meta, q on cpu",
    ),
    "captured tensor too small": (
        lambda: fa4flex.compile(lambda s, b, h, q, k, t=torch.zeros(9): s + t[k])(*dense()),
        InputError,
        "past the captured tensor t of shape.*test_errors.py",
    ),
    "mask reads past a captured tensor": (
        lambda: fa4flex.compile(mask=lambda b, h, q, k, t=torch.zeros(9): t[k] > 0)(*dense()),
        InputError,
        r"past the captured tensor t of shape \[9\].*test_errors.py",
    ),
    "mask as score_mod": (
        lambda: fa4flex.compile(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx),
        TraceError,
        "looks like a mask_mod.*test_errors.py",
    ),
    "score mod among masks": (
        lambda: fa4flex.compile(mask=causal & alibi),
        InputError,
        "score mod alibi.. was given as a mask.*pass it as score_mod=",
    ),
    "mask as a chained score mod": (
        lambda: fa4flex.compile(alibi >> causal),
        InputError,
        "mask causal.. was given as a score_mod.*pass it as mask=",
    ),
    "nothing returned": (
        lambda: fa4flex.compile(lambda s, b, h, q_idx, kv_idx: None),
        TraceError,
        "returned None.*test_errors.py",
    ),
    "python randomness": (
        lambda: fa4flex.compile(lambda s, b, h, q, k: s * random.random()),
        TraceError,
        "draws random numbers.*test_errors.py",
    ),
    "numpy randomness": (
        lambda: fa4flex.compile(mask=lambda b, h, q, k: q - k < numpy.random.rand()),
        TraceError,
        "draws random numbers",
    ),
    "scale": (lambda: fa4flex.compile(scale="0.1"), InputError, "scale is a str"),  # type: ignore[arg-type]
    "scale grad": (
        lambda: fa4flex.compile(scale=torch.ones((), requires_grad=True)),  # type: ignore[arg-type]
        InputError,
        "scale.*requires grad",
    ),
    "precision": (
        lambda: fa4flex.compile(precision="float64"),  # type: ignore[arg-type]
        InputError,
        "precision is a str.*fa4flex.Precision",
    ),
    "schedule": (
        lambda: fa4flex.compile(schedule=64),  # type: ignore[arg-type]
        InputError,
        "schedule is a int.*fa4flex.Schedule",
    ),
    "sinks type": (
        lambda: fa4flex.compile(sinks=[1.0]),  # type: ignore[arg-type]
        InputError,
        "sinks of list",
    ),
    "blocks type": (
        lambda: fa4flex.compile(blocks=torch.ones(2, 2)),  # type: ignore[arg-type]
        InputError,
        "blocks is a Tensor.*BlockMap",
    ),
    "varlen type": (lambda: plain(*packed(), varlen=cu(0, 16)), InputError, "varlen is a Tensor"),
    "paging type": (lambda: plain(*dense(), paging=cu(0, 16)), InputError, "paging is a Tensor"),
    "sparse tensor": (
        lambda: plain(*(x.to_sparse() for x in dense())),
        InputError,
        r"torch.sparse_coo.*to_dense\(\)",
    ),
    "flex return_aux": (
        lambda: fa4flex.flex_attention(*dense(), return_aux=True),  # type: ignore[arg-type]
        InputError,
        "return_aux is a bool",
    ),
    "explain a length": (
        lambda: plain.explain(12.5),  # type: ignore[arg-type]
        InputError,
        "q_len=12.5",
    ),
    "view tile": (
        lambda: plain.mask.tile_map(16, 16, 4),  # type: ignore[arg-type]
        InputError,
        "tile=4",
    ),
    "flex gqa": (
        lambda: fa4flex.flex_attention(rand(1, 4, 4, 8), rand(1, 2, 4, 8), rand(1, 2, 4, 8)),
        InputError,
        "enable_gqa=True",
    ),
    "flex kernel options": (
        lambda: fa4flex.flex_attention(*dense(), kernel_options={"BACKENDS": "TRITON"}),
        UnsupportedError,
        r"kernel_options 'BACKENDS'.*did you mean 'BACKEND'",
    ),
    "flex two returns": (
        lambda: fa4flex.flex_attention(
            *dense(), return_lse=True, return_aux=torch.nn.attention.flex_attention.AuxRequest(lse=True)
        ),
        InputError,
        "return_lse and return_aux",
    ),
    "index overflow": (
        lambda: fa4flex.compile(mask=lambda b, h, q, k: (q * 2**40) * (k * 2**40) % 3 == 0)(*dense()),
        UnsupportedError,
        "64-bit",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_message(name: str) -> None:
    call, kind, text = CALLS[name]
    with pytest.raises(kind, match=f"(?s){text}") as caught:
        call()
    if isinstance(caught.value, fa4flex.Fa4flexError):
        assert "expected: " in str(caught.value) and "to fix: " in str(caught.value)


def _dense_map(heads: int, batch: int = 1) -> BlockMap:
    return BlockMap.from_dense(torch.rand(batch, heads, 2, 2) < 0.6, 8)


def _pages() -> tuple[Tensor, Paging]:
    return rand(4, 8, 4, 8), Paging(torch.tensor([[0, 1], [3, 2]]), torch.tensor([16, 9]))


def _paged_map(kv_len: int) -> Any:
    cache, paging = _pages()
    blocks = BlockMap.from_dense(torch.rand(2, 1) < 0.6, 8, kv_len=8).grown(kv_len=kv_len)
    return fa4flex.compile(blocks=blocks)(dense()[0], cache, cache, paging=paging)


def _with_map(blocks: BlockMap) -> Any:
    return fa4flex.compile(blocks=blocks)(*dense())


def tilted(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, slope: Any) -> Any:
    return score + slope * (kv_idx - q_idx)


def _jagged() -> Tensor:
    return torch.nested.nested_tensor([rand(3, 4, 8), rand(2, 4, 8)], layout=torch.jagged)


wide, few = _dense_map(8), _dense_map(2, 2)
qkv, tokens = dense(), packed()
jagged = _jagged()
turned = jagged.transpose(1, 2)
vector = torch.randn(4, 16)
offsets = Varlen(cu(0, 16))

ADVICE: dict[str, tuple[Callable[[], Any], str, Callable[[], Any]]] = {
    "a short map and pages": (
        lambda: _paged_map(8),
        r"16 tokens with a block map of kv_len=8.*blocks.grown\(kv_len=16\)",
        lambda: _paged_map(16),
    ),
    "a map of more heads": (
        lambda: _with_map(wide),
        r"make the map with 4 heads, or take a part of it: blocks\[:, :4\]",
        lambda: _with_map(wide[:, :4]),
    ),
    "a map of KV heads": (
        lambda: _with_map(few),
        r"heads are query heads.*blocks.for_query_heads\(4\)",
        lambda: _with_map(few.for_query_heads(4)),
    ),
    "a batch of queries alone": (
        lambda: plain(qkv[0], qkv[1][:1], qkv[2][:1]),
        r"expand those of batch 1, e.g. k.expand\(q.shape\[0\], -1, -1, -1\)",
        lambda: plain(qkv[0], *(x[:1].expand(2, -1, -1, -1) for x in qkv[1:])),
    ),
    "a batch of keys alone": (
        lambda: plain(qkv[0][:1], *qkv[1:]), "expand those of batch 1",
        lambda: plain(qkv[0][:1].expand(2, -1, -1, -1), *qkv[1:]),
    ),
    "k and v of other heads": (
        lambda: fa4flex.flex_attention(qkv[0], qkv[1], qkv[2][:, :2], enable_gqa=True),
        r"call fa4flex.compile\(...\) or fa4flex.attention",
        lambda: fa4flex.attention(qkv[0], qkv[1], qkv[2][:, :2]),
    ),
    "sinks of KV heads": (
        lambda: fa4flex.compile(sinks=torch.zeros(2))(*qkv),
        r"sinks.repeat_interleave\(2\)",
        lambda: fa4flex.compile(sinks=torch.zeros(2).repeat_interleave(2))(*qkv),
    ),
    "too many sinks": (
        lambda: fa4flex.compile(sinks=torch.zeros(8))(*qkv),
        "pass 4 of them",
        lambda: fa4flex.compile(sinks=torch.zeros(8)[:4])(*qkv),
    ),
    "slopes of another model": (
        lambda: fa4flex.compile(score_mod=alibi(torch.ones(8)))(*qkv),
        "give it a table of 4 heads",
        lambda: fa4flex.compile(score_mod=alibi(torch.ones(4)))(*qkv),
    ),
    "slopes that are a list": (
        lambda: alibi([1, 2]), r"torch.as_tensor\(slopes, dtype=torch.float32\)",
        lambda: alibi(torch.as_tensor([1, 2], dtype=torch.float32)),
    ),
    "tokens that no sequence has": (
        lambda: plain(*tokens, varlen=Varlen(cu(0, 10))),
        r"slice it: q\[:10\]",
        lambda: plain(*(x[:10] for x in tokens), varlen=Varlen(cu(0, 10))),
    ),
    "tokens that no sequence uses": (
        lambda: plain(*tokens, varlen=Varlen(cu(0, 10))),
        "or end the last sequence at 16 and pass seqused",
        lambda: plain(*tokens, varlen=Varlen(cu(0, 16), seqused_q=cu(10), seqused_k=cu(10))),
    ),
    "sequences past the tokens": (
        lambda: plain(*tokens, varlen=Varlen(cu(0, 20))), "pass cumulative lengths of these 16 tokens",
        lambda: plain(*tokens, varlen=offsets),
    ),
    "fewer keys": (
        lambda: plain(tokens[0], tokens[1][:9], tokens[2][:9], varlen=offsets), "pass cu_seqlens_k where",
        lambda: plain(tokens[0], tokens[1][:9], tokens[2][:9], varlen=Varlen(cu(0, 16), cu(0, 9))),
    ),
    "a batch with cu_seqlens": (
        lambda: plain(*qkv, varlen=Varlen(cu(0, 16, 32))), r"q.transpose\(1, 2\).flatten\(0, 1\) of bhsd",
        lambda: plain(*(x.transpose(1, 2).flatten(0, 1) for x in qkv), varlen=Varlen(cu(0, 16, 32))),
    ),
    "one length for a batch": (
        lambda: plain(*qkv, varlen=Varlen(seqused_k=cu(9))), "the length of each of the 2 entries",
        lambda: plain(*qkv, varlen=Varlen(seqused_k=cu(9, 16))),
    ),
    "lengths past the end": (
        lambda: plain(*qkv, varlen=Varlen(seqused_k=cu(9, 17))), r"seqused_k.clamp\(max=16\)",
        lambda: plain(*qkv, varlen=Varlen(seqused_k=cu(9, 17).clamp(max=16))),
    ),
    "nested tensors": (
        lambda: fa4flex.flex_attention(*[jagged] * 3), r"q.values\(\) of a jagged .*Varlen\(q.offsets\(\)\)",
        lambda: plain(*[jagged.values()] * 3, varlen=Varlen(jagged.offsets())),
    ),
    "nested tensors of another layout": (
        lambda: plain(jagged, jagged, jagged), r"turn it: q.transpose\(1, 2\)",
        lambda: plain(*[jagged.transpose(1, 2)] * 3),
    ),
    "a nested tensor and plain ones": (
        lambda: plain(turned, turned, turned.values()), "nested_tensor_from_jagged",
        lambda: plain(turned, turned, turned),
    ),
    "a window of none": (lambda: sliding_window(0), "a Python int of 1 or more", lambda: sliding_window(1)),
    "a window that is a float": (lambda: sliding_window(3.0), "pass a Python int", lambda: sliding_window(3)),
    "no soft cap": (lambda: softcap(0.0), "leave softcap out", lambda: plain(*qkv)),
    "a soft cap that is a tensor": (
        lambda: softcap(torch.tensor(3.0)), "pass a Python number", lambda: softcap(3.0),
    ),
    "a vector read backwards": (
        lambda: fa4flex.compile(lambda s, b, h, q, k: s + vector[h][::-1][k])(*qkv), r"x\[n - 1 - i\]",
        lambda: fa4flex.compile(lambda s, b, h, q, k: s + vector[h][15 - k])(*qkv),
    ),
    "dropout in a mod": (
        lambda: fa4flex.compile(lambda s, b, h, q, k: torch.nn.functional.dropout(s, 0.5))(*qkv),
        "drop pairs in a mask, by a hash",
        lambda: fa4flex.compile(mask=lambda b, h, q, k: (q * 16 + k) * 0x45D9F3B % 1013 > 500)(*qkv),
    ),
    "a mask called without lengths": (
        lambda: causal()(0, 0, 3, 4), r"^causal\(\) was called without q_len, kv_len.*causal\(\).bind\(",
        lambda: causal().bind(q_len=9, kv_len=9)(0, 0, 3, 4),
    ),
    "a score mod called without lengths": (
        lambda: alibi()(0.0, 0, 0, 3, 4), r"expected: alibi\(\)\(score, b, h, q_idx, kv_idx, ",
        lambda: alibi()(0.0, 0, 0, 3, 4, q_len=9, kv_len=9, num_heads=2),
    ),
    "a parameter that is a number": (
        lambda: fa4flex.nn.Attention(tilted, parameters={"slope": 0.5}), r"torch.tensor\(0.5\)",
        lambda: fa4flex.nn.Attention(tilted, parameters={"slope": torch.tensor(0.5)})(*qkv),
    ),
    "a family called as a mask": (
        lambda: causal(0, 0, 3, 4), r"causal with parameters that it does not have.*causal\(...\)",
        lambda: causal()(0, 0, 3, 4, q_len=9, kv_len=9),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ADVICE)
def test_advice_that_is_followed_works(name: str) -> None:
    wrong, text, followed = ADVICE[name]
    with pytest.raises(fa4flex.Fa4flexError, match=f"(?s){text}"):
        wrong()
    assert followed() is not None


def test_a_width_is_padded_at_its_own_scale() -> None:
    """The advice for a head_dim that kernels do not have keeps the result."""
    with pytest.raises(UnsupportedError, match=r"q and k with zeros to 16, and keep the scale: scale=12"):
        plain.source("plan", head_dim=12)
    q, k, v = dense(d=12)
    wider = [torch.nn.functional.pad(x, (0, 4)) for x in (q, k)]
    torch.testing.assert_close(fa4flex.attention(*wider, v, scale=12**-0.5), plain(q, k, v))


def test_a_call_says_which_variant_failed() -> None:
    with pytest.raises(InputError) as caught:
        fa4flex.compile(mask=causal)(*packed())
    assert any("causal()" in note for note in caught.value.__notes__)


def test_seeded_randomness_is_no_randomness() -> None:
    """Generators that move are only a hint: the result decides."""

    def seeded(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * (1.0 + 0 * random.random())

    fa4flex.compile(seeded)
