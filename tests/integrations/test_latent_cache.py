"""Caches of latent rows under transformers: models decode over the rows themselves, and choose eager's
tokens."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from models import FAMILIES, transformers
from torch import Tensor
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention

from fa4flex import InputError, LatentFormat, UnsupportedError
from fa4flex.integrations import latent_keys
from fa4flex.integrations.latent_cache import LatentCache, PagedLatentCache
from fa4flex.integrations.paged_cache import Batch
from fa4flex.primitives.latent import Segment

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
NEW, RANK, ROPE = 6, 16, 4

pytestmark = pytest.mark.skipif(
    not hasattr(DeepseekV2Attention, "expand_kv"),
    reason=f"transformers {transformers.__version__} caches keys of heads",
)

FORMATS = {
    "like v3.2": LatentFormat((Segment(E4M3, RANK, torch.float32, 8), Segment(BF16, ROPE))),
    "like v4": LatentFormat((Segment(E4M3, RANK, torch.float8_e8m0fnu, 4), Segment(BF16, ROPE)), True, 1),
    "per tensor": LatentFormat((Segment(E4M3, RANK + ROPE),)),
}
_SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256, "pad_token_id": 0,
    "eos_token_id": None, "bos_token_id": 1, "q_lora_rank": 16, "kv_lora_rank": RANK,
    "qk_rope_head_dim": ROPE, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip


def model_of(name: str, implementation: str, dtype: torch.dtype = torch.float32, **sizes: int) -> Any:
    if name in FAMILIES:
        return FAMILIES[name].build(implementation, dtype)
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**_SIZES, **sizes})
    cls = getattr(transformers, f"{name}ForCausalLM")
    model = cls._from_config(config, attn_implementation=implementation).eval()
    for parameter in model.parameters():
        parameter.data.mul_(3.0 if parameter.ndim > 1 else 1.0)
    return model.to(dtype)


def generated(model: Any, ids: Tensor, mask: Tensor, cache: Any, **options: Any) -> Tensor:
    given = {} if cache is None else {"past_key_values": cache}
    made: Tensor = model.generate(
        ids, attention_mask=mask, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0,
        **given, **options,
    )  # fmt: skip
    return made


def close(found: Tensor, truth: Tensor) -> None:
    """Models of float64 have norms of float32."""
    torch.testing.assert_close(found, truth, atol=1e-5, rtol=1e-5)


@pytest.fixture
def absorbed(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Calls of absorbed attention, by their number of queries."""
    counted: Counter[int] = Counter()
    real = latent_keys.Absorption.queries

    def queries(self: Any, query: Tensor) -> Tensor:
        counted[query.shape[2]] += 1
        return real(self, query)

    monkeypatch.setattr(latent_keys.Absorption, "queries", queries)
    return counted


@torch.no_grad()
def gaps(eager: Any, prompts: list[list[int]], found: list[list[int]]) -> Tensor:
    """Distances of the logits of found tokens from the largest ones that eager has there."""
    rows = [torch.tensor(prompt + tokens) for prompt, tokens in zip(prompts, found, strict=True)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)  # causal: padding behind changes nothing
    logits = eager(ids).logits
    below = []
    for row, prompt, tokens in zip(logits, prompts, found, strict=True):
        each = row[len(prompt) - 1 : len(prompt) + len(tokens) - 1]
        below.append(each.amax(-1) - each.gather(1, torch.tensor(tokens)[:, None])[:, 0])
    return torch.cat(below)


CLOSE = 1e-4
"""Logits, of some units, that are as good as equal: float32 leaves tokens to chance below."""


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v2", "Glm4MoeLite", "Youtu", "MiniCPM3", "AXK1"])
@pytest.mark.parametrize("padded", [False, True])
def test_generated_tokens_are_eagers(name: str, padded: bool, absorbed: Counter[int]) -> None:
    """Prompts have keys made of rows for each head, where that is cheaper; steps are absorbed."""
    if name not in FAMILIES and not hasattr(transformers, f"{name}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    model, prompt = model_of(name, "fa4flex"), random.randint(17, 30)
    ids = torch.randint(3, 60, (3, prompt))
    lengths = [random.randint(1, prompt) if padded else prompt for _ in range(3)]
    mask = torch.stack([torch.arange(prompt) >= prompt - n for n in lengths]).long()
    found = generated(model, ids, mask, LatentCache(model))
    assert absorbed[1] == 2 * (NEW - 1) and len(absorbed) == 1
    prompts = [row[prompt - n :].tolist() for row, n in zip(ids, lengths, strict=True)]
    assert gaps(model_of(name, "eager"), prompts, found[:, prompt:].tolist()).max() < CLOSE


def test_short_prompts_are_absorbed(absorbed: Counter[int]) -> None:
    model = model_of("deepseek_v3", "fa4flex")
    ids = torch.randint(3, 60, (2, 9))
    found = generated(model, ids, torch.ones_like(ids), LatentCache(model))
    assert absorbed[9] == 2
    assert gaps(model_of("deepseek_v3", "eager"), ids.tolist(), found[:, 9:].tolist()).max() < CLOSE


def test_any_implementation_reads_the_cache(absorbed: Counter[int]) -> None:
    """eager and sdpa make keys and values of the rows, as of transformers' own cache."""
    eager = model_of("deepseek_v3", "eager")
    ids = torch.randint(3, 60, (2, 20))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    truth = generated(eager, ids, mask, None)
    for name in ("eager", "sdpa"):
        model = model_of("deepseek_v3", name)
        found = generated(model, ids, mask, LatentCache(model))
        prompts = [ids[0, 5:].tolist(), ids[1].tolist()]
        assert gaps(eager, prompts, found[:, 20:].tolist()).max() < CLOSE
    assert not absorbed and truth.shape == found.shape


def test_beams() -> None:
    """Rows follow their beams."""
    model, eager = (model_of("deepseek_v3", name, torch.float64) for name in ("fa4flex", "eager"))
    ids = torch.randint(3, 60, (2, 7))
    options = {"num_beams": 3, "output_scores": True, "return_dict_in_generate": True}
    made = [
        x.generate(
            ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0, past_key_values=cache, **options
        ).sequences_scores
        for x, cache in ((model, LatentCache(model)), (eager, None))
    ]
    torch.testing.assert_close(*made, atol=1e-5, rtol=0)


@torch.no_grad()
def test_chunks_growth_and_cropping() -> None:
    """Logits of chunks that outgrow the memory of a cache, of what was taken back and given again, and of
    rows that were selected and repeated, are those of the whole."""
    model = model_of("deepseek_v3", "fa4flex", torch.float64)
    ids = torch.randint(3, 60, (2, 90))
    whole = model(ids, use_cache=False).logits
    cache, at, made = LatentCache(model), 0, []
    for size in (3, 1, 20, 45, 1, 20):
        made.append(model(ids[:, at : at + size], past_key_values=cache, use_cache=True).logits)
        at += size
    close(torch.cat(made, 1), whole)
    cache.crop(-30)
    assert cache.get_seq_length() == 60
    again = model(ids[:, 60:], past_key_values=cache, use_cache=True).logits
    close(again, whole[:, 60:])
    cache.crop(70)
    cache.batch_select_indices(torch.tensor([1]))
    cache.batch_repeat_interleave(2)
    again = model(ids[1:, 70:].expand(2, -1), past_key_values=cache, use_cache=True).logits
    close(again, whole[1:, 70:].expand(2, -1, -1))
    cache.batch_select_indices(torch.tensor([0, 1]))
    cache.reset()
    close(model(ids, past_key_values=cache, use_cache=True).logits, whole)


@pytest.mark.parametrize("name", [x for x, form in FORMATS.items() if not form.planes])
@torch.no_grad()
def test_rows_of_8_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Absorbed attention over bytes is what the model makes of the rows that they stand for; and differs from
    attention over rows that were not rounded. One layer: in a second one, float32's noise (of norms) may move
    a number to another of 8 bits."""
    model = model_of("DeepseekV3", "fa4flex", torch.float64, num_hidden_layers=1)
    ids, scale = torch.randint(3, 60, (2, 24)), torch.tensor(0.03) if name == "per tensor" else None
    logits = {}
    for most in (64, -1):
        monkeypatch.setattr(latent_keys, "MOST_ABSORBED", most)
        cache = LatentCache(model, FORMATS[name], scale)
        parts = [model(x, past_key_values=cache, use_cache=True).logits for x in ids.split([20, 1, 3], 1)]
        logits[most] = torch.cat(parts, 1)
        assert cache.layers[0].cache.dtype == torch.uint8
    close(logits[64], logits[-1])
    assert (logits[64] - model(ids, use_cache=False).logits).abs().max() > 1e-3


# --- continuous batching ----------------------------------------------------------------------------------


@dataclass(eq=False)
class Request:
    prompt: list[int]
    made: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    cached: int = 0

    @property
    def waiting(self) -> list[int]:
        return (self.prompt + self.made)[self.cached :]


class Server:
    """Requests over pages: as many as there are pages for, chunks of prompts beside single tokens."""

    def __init__(self, model: Any, cache: PagedLatentCache, pages: int, page_size: int) -> None:
        self.model, self.cache, self.page_size = model, cache, page_size
        self.free = list(range(pages))
        random.shuffle(self.free)
        self.mixed = 0
        self.shuffled = random.random() < 0.5

    def serve(self, requests: list[Request], most: int) -> Iterator[Tensor]:
        """Steps until all are done; each gives the logits of its tokens."""
        queue, running = deque(requests), list[Request]()
        while queue or running:
            while queue and self.pages_of(queue[0]) <= len(self.free):
                request = queue.popleft()
                request.pages = [self.free.pop() for _ in range(self.pages_of(request))]
                running.append(request)
            chunks, room = list[tuple[Request, list[int]]](), most
            for request in sorted(running, key=lambda x: len(x.waiting) > 1):
                if room:
                    chunks.append((request, request.waiting[:room]))
                    room -= len(chunks[-1][1])
            if self.shuffled:
                random.shuffle(chunks)
            yield self.step(chunks)
            for request in [x for x in running if len(x.made) == NEW]:
                running.remove(request)
                self.free += request.pages

    def pages_of(self, request: Request) -> int:
        return -(-(len(request.prompt) + NEW) // self.page_size)

    def step(self, chunks: list[tuple[Request, list[int]]]) -> Tensor:
        """Compute these tokens; requests whose tokens all are in the cache get one more."""
        counts = [len(tokens) for _, tokens in chunks]
        self.mixed += min(counts) == 1 < max(counts)
        columns = max(len(x.pages) for x, _ in chunks)
        table = torch.tensor([x.pages + [0] * (columns - len(x.pages)) for x, _ in chunks], dtype=torch.int32)
        lengths = torch.tensor([x.cached + n for (x, _), n in zip(chunks, counts, strict=True)])
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        if self.shuffled:  # single tokens anywhere between chunks, which the batch moves to the front
            self.cache.step(Batch.of_starts(table, lengths.int(), starts, starts, invariant=True))
        else:
            self.cache.step(Batch.of_starts(table, lengths.int(), starts, starts))
        places = [i for (x, _), n in zip(chunks, counts, strict=True) for i in range(x.cached, x.cached + n)]
        tokens = torch.tensor([token for _, part in chunks for token in part])
        logits: Tensor = self.model(
            tokens[None], position_ids=torch.tensor(places)[None], past_key_values=self.cache, use_cache=True
        ).logits[0]
        for (request, part), end in zip(chunks, starts[1:].tolist(), strict=True):
            request.cached += len(part)
            if not request.waiting:
                request.made.append(int(logits[end - 1].argmax()))
        return logits


@torch.no_grad()
def served(model: Any, requests: list[Request], pages: int, page_size: int) -> Server:
    server = Server(model, PagedLatentCache(model, pages, page_size), pages, page_size)
    for _ in server.serve(requests, 64):
        pass
    return server


def drawn_requests(count: int) -> list[Request]:
    return [Request(torch.randint(3, 60, (random.randint(1, 39),)).tolist()) for _ in range(count)]


@pytest.mark.parametrize("name", ["deepseek_v3", pytest.param("deepseek_v2", marks=pytest.mark.slow)])
def test_32_requests_over_pages(name: str) -> None:
    """Fewer pages than all requests need; pages are used again."""
    model, requests = model_of(name, "fa4flex"), drawn_requests(32)
    server = served(model, requests, pages=48, page_size=8)
    assert server.mixed > 2
    eager = model_of(name, "eager")
    assert gaps(eager, [x.prompt for x in requests], [x.made for x in requests]).max() < CLOSE


@pytest.mark.parametrize("name", FORMATS)
@torch.no_grad()
def test_pages_of_8_bits(name: str) -> None:
    """Logits of a request in chunks over pages are those of the model over what bytes stand for."""
    form, scale = FORMATS[name], torch.tensor(0.03) if name == "per tensor" else None
    model = model_of("DeepseekV3", "fa4flex", torch.float64, num_hidden_layers=1)
    cache, request = PagedLatentCache(model, 12, 4, form, scale), drawn_requests(1)[0]
    request.prompt = (request.prompt * 10)[:21]
    logits = torch.cat([x[: len(request.prompt)] for x in Server(model, cache, 12, 4).serve([request], 9)])
    ids = torch.tensor([request.prompt + request.made])[:, :-1]
    rows = LatentCache(model, _in_rows(form), scale)
    close(logits, model(ids, past_key_values=rows, use_cache=True).logits[0])
    assert (logits - model(ids, use_cache=False).logits[0]).abs().max() > 1e-3


def _in_rows(form: LatentFormat) -> LatentFormat:
    """The same numbers without planes."""
    return LatentFormat(form.segments, pad=form.pad)


@torch.no_grad()
def test_padding_behind_a_batch_is_not_written() -> None:
    """Tokens past those of the batch are computed, and kept by nobody."""
    model = model_of("deepseek_v3", "fa4flex")
    cache = PagedLatentCache(model, pages=3, page_size=4)
    starts = torch.tensor([0, 3], dtype=torch.int32)
    cache.step(Batch.of_starts(torch.tensor([[1]]), torch.tensor([3]), starts, starts))
    ids = torch.randint(3, 60, (1, 5))
    logits = model(ids, position_ids=torch.arange(5)[None], past_key_values=cache, use_cache=True).logits
    for layer in cache.layers:
        assert layer.latent.cache[1, :3].any(-1).all() and not layer.latent.cache[1, 3:].any()
        assert not layer.latent.cache[[0, 2]].any()
    torch.testing.assert_close(logits[:, :3], model(ids[:, :3], use_cache=False).logits, atol=1e-4, rtol=1e-4)


# --- what is refused --------------------------------------------------------------------------------------


def test_other_models_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="0 of whose 2 layers have"):
        LatentCache(FAMILIES["llama"].build("fa4flex", torch.float32))
    if hasattr(transformers, "DeepseekV32Config"):
        with pytest.raises(UnsupportedError, match="selects keys by an indexer"):
            LatentCache(model_of("DeepseekV32", "fa4flex"))


def test_older_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("deepseek_v3", "fa4flex")
    monkeypatch.delattr(type(model.model.layers[0].self_attn), "expand_kv")
    with pytest.raises(UnsupportedError, match="caches keys and values of each head"):
        LatentCache(model)


def test_projections_that_are_not_plain_are_refused() -> None:
    model = model_of("deepseek_v3", "fa4flex")
    layer = model.model.layers[1].self_attn
    layer.kv_b_proj = torch.nn.Linear(16, 64, bias=True)
    with pytest.raises(UnsupportedError, match="without bias"):
        PagedLatentCache(model, 4)


def test_formats_that_do_not_fit_are_refused() -> None:
    model = model_of("deepseek_v3", "fa4flex")
    with pytest.raises(InputError, match="576 columns for rows of 16"):
        LatentCache(model, LatentFormat.DEEPSEEK_V3_2)
    with pytest.raises(UnsupportedError, match="use PagedLatentCache"):
        LatentCache(model, FORMATS["like v4"])


@torch.no_grad()
def test_calls_that_do_not_fit_are_refused() -> None:
    model, eager = (model_of("deepseek_v3", name) for name in ("fa4flex", "eager"))
    ids = torch.randint(3, 60, (1, 3))
    cache = PagedLatentCache(model, pages=3, page_size=4)
    with pytest.raises(InputError, match=r"call cache.step\(batch\)"):
        model(ids, past_key_values=cache, use_cache=True)
    starts = torch.tensor([0, 3], dtype=torch.int32)
    batch = Batch.of_starts(torch.tensor([[1]]), torch.tensor([3]), starts, starts)
    cache.step(batch)
    with pytest.raises(InputError, match="of a batch of 3 tokens"):
        model(ids[:, :2], past_key_values=cache, use_cache=True)
    other = PagedLatentCache(eager, pages=3, page_size=4)
    other.step(batch)
    with pytest.raises(UnsupportedError, match="under attn_implementation='eager'"):
        eager(ids, past_key_values=other, use_cache=True)
    with pytest.raises(UnsupportedError, match="output_attentions=True over latent rows"):
        model(ids, past_key_values=LatentCache(model), use_cache=True, output_attentions=True)
    every = torch.ones(1, 1, 3, 3, dtype=torch.bool)
    with pytest.raises(UnsupportedError, match="a mask of its own"):
        model(ids, attention_mask=every, past_key_values=cache, use_cache=True)
    model.model.layers[0].self_attn.attention_dropout = 0.5
    with pytest.raises(UnsupportedError, match=r"attention dropout 0\.5 in continuous batching"):
        model.train()(ids, past_key_values=cache, use_cache=True)
    model.eval()
    wrong = Batch.of_starts(torch.tensor([[7]]), torch.tensor([3]), starts, starts)
    cache.step(wrong)
    with pytest.raises(InputError, match="page 7 in the page table"):
        model(ids, past_key_values=cache, use_cache=True)


def test_gradients_are_refused() -> None:
    model = model_of("deepseek_v3", "fa4flex")
    with pytest.raises(UnsupportedError, match="require gradients"):
        model(torch.randint(3, 60, (1, 3)), past_key_values=LatentCache(model), use_cache=True)


def test_models_of_other_caches_are_left_alone() -> None:
    """expand_kv is replaced for all models of a class, and does what it did for theirs."""
    model = model_of("deepseek_v3", "fa4flex")
    LatentCache(model)
    layer = model.model.layers[0].self_attn
    assert hasattr(type(layer).expand_kv, "fa4flex")
    k, v = layer.expand_kv(torch.randn(1, 1, 2, RANK), torch.randn(1, 1, 2, ROPE))
    assert k.shape == (1, 4, 2, 12) and v.shape == (1, 4, 2, 8)
