"""The backend of diffusers' dispatcher beside its native one, and layers that do not dispatch: over diffusers
where it is installed, over a stub of its dispatcher elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engines import with_stubs
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint

import fa4flex
from fa4flex.errors import InputError, UnsupportedError
from fa4flex.integrations import composed
from fa4flex.reference import attention as exact
from fa4flex.variants import sliding_window

B, TOKENS, TEXT, HEADS, WIDTH = 2, 24, 7, 4, 8
DOUBLE = {"dtype": torch.float64, "requires_grad": True}


@pytest.fixture
def finite_masks() -> None:
    """No model of transformers is under test."""


@pytest.fixture(scope="module")
def door() -> Iterator[ModuleType]:
    for module in with_stubs("diffusers"):
        module.register()  # an import before there was diffusers did not
        yield module


@pytest.fixture(autouse=True)
def forgotten(door: ModuleType) -> Iterator[None]:
    """No composition that another test left matters."""
    from diffusers.models import attention_dispatch

    registry = attention_dispatch._AttentionBackendRegistry
    before = {
        name: getattr(registry, name) for name in ("_active_backend", "active") if hasattr(registry, name)
    }
    composed._ended.calls = False
    yield
    assert not composed._entered
    for name, value in before.items():
        setattr(registry, name, value)
    torch._dynamo.reset()


def dispatched(*qkv: Any, backend: str = "fa4flex", **options: Any) -> Tensor:
    from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn

    return dispatch_attention_fn(*qkv, backend=AttentionBackendName(backend), **options)


def leaves(kv_len: int = TOKENS, kv_heads: int = HEADS, **how: Any) -> tuple[Tensor, ...]:
    how = DOUBLE | how
    return (
        torch.randn(B, TOKENS, HEADS, WIDTH, **how),
        torch.randn(B, kv_len, kv_heads, WIDTH, **how),
        torch.randn(B, kv_len, kv_heads, WIDTH, **how),
    )


def gradients(out: Tensor, inputs: Any) -> tuple[Tensor, ...]:
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return torch.autograd.grad((out * weights).sum(), [*inputs])


def agree(got: Tensor, expected: Tensor, inputs: Any) -> None:
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(gradients(got, inputs), gradients(expected, inputs))


def oracle(qkv: tuple[Tensor, ...], score_mod: Any = None, mask: Any = None) -> Tensor:
    return exact(*(x.transpose(1, 2) for x in qkv), score_mod, mask)[0].transpose(1, 2)


# --- calls of the dispatcher --------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_len", [TOKENS, TEXT])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}])
def test_calls_are_those_of_the_native_backend(kv_len: int, options: dict[str, Any]) -> None:
    qkv = leaves(kv_len)
    agree(dispatched(*qkv, **options), dispatched(*qkv, backend="native", **options), qkv)


def test_groups_of_heads() -> None:
    qkv = leaves(kv_heads=2)
    agree(dispatched(*qkv, enable_gqa=True), dispatched(*qkv, backend="native", enable_gqa=True), qkv)
    with pytest.raises(InputError, match="4 heads of queries and 2 of keys"):
        dispatched(*qkv)


SHAPES = [(B, TEXT), (B, 1, 1, TEXT), (1, 1, TOKENS, TEXT), (TOKENS, TEXT), (B, HEADS, TOKENS, TEXT)]


@pytest.mark.parametrize("shape", SHAPES)
def test_masks_of_the_model(shape: tuple[int, ...]) -> None:
    """A mask [B, Skv] is padding, as for the native backend; queries without keys give 0."""
    qkv = leaves(TEXT)
    allowed = torch.rand(shape) > 0.3
    allowed[..., 1:] |= True
    allowed[..., 0] = False
    agree(dispatched(*qkv, attn_mask=allowed), dispatched(*qkv, backend="native", attn_mask=allowed), qkv)
    bias = torch.randn(shape, **DOUBLE)
    inputs = (*qkv, bias)
    agree(dispatched(*qkv, attn_mask=bias), dispatched(*qkv, backend="native", attn_mask=bias), inputs)
    assert not dispatched(*qkv, attn_mask=torch.zeros(1, TEXT, dtype=torch.bool)).any()


def test_without_diffusers_the_door_says_so(door: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"fa4flex\[diffusers\]"):
        door.register()


def test_another_dispatcher_is_refused(door: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions that register backends in another way."""
    from diffusers.models import attention_dispatch

    monkeypatch.delattr(attention_dispatch, "_AttentionBackendRegistry")
    with pytest.raises(UnsupportedError, match="diffusers>=0"):
        door.register()


def test_the_backend_has_a_name_like_others(door: ModuleType) -> None:
    from diffusers.models.attention_dispatch import (
        AttentionBackendName,
        attention_backend,
        dispatch_attention_fn,
    )

    door.register()  # again
    member = AttentionBackendName("fa4flex")
    assert AttentionBackendName["FA4FLEX"] is AttentionBackendName.FA4FLEX is member and member == "fa4flex"
    assert [x.value for x in AttentionBackendName].count("fa4flex") == 1
    assert isinstance(member, AttentionBackendName) and AttentionBackendName("native").value == "native"
    with attention_backend("fa4flex"), door.fa4flex_attention(mask=sliding_window(2)) as inside:
        dispatch_attention_fn(*leaves())
    assert inside.calls == 1


def test_what_it_does_not_know_is_refused() -> None:
    qkv = leaves()
    with pytest.raises(InputError, match="window_size"):
        dispatched(*qkv, attention_kwargs={"window_size": (2, 2)})
    with pytest.raises(UnsupportedError, match="return_lse"):
        dispatched(*qkv, attention_kwargs={"return_lse": True})
    with pytest.raises(UnsupportedError, match="parallel_config"):
        dispatched(*qkv, parallel_config=object())
    with pytest.raises(InputError, match="attn_mask and is_causal"):
        dispatched(*qkv, attn_mask=torch.ones(TOKENS, TOKENS) > 0, is_causal=True)
    allowed = torch.ones(TOKENS, TOKENS, dtype=torch.bool)
    for wrong in (allowed[:3], allowed.int(), allowed[0]):
        with pytest.raises(InputError, match="broadcasts to"):
            dispatched(*qkv, attn_mask=wrong)


# --- compositions -------------------------------------------------------------------------------------------


def near(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx - kv_idx).abs() <= 3


def leaning(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score - 0.1 * (h + 1) * (q_idx - kv_idx).abs()


def blocks(*classes: list[int]) -> fa4flex.BlockMap:
    return fa4flex.BlockMap.from_dense(torch.tensor(classes).to(torch.uint8), 8)


SPARSE = [2, 0, 1], [0, 2, 0], [1, 0, 2]


def in_blocks(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return torch.tensor(SPARSE)[q_idx // 8, kv_idx // 8] > 0


def compositions() -> dict[str, tuple[dict[str, Any], Any, Any]]:
    torch_mask = create_block_mask(near, None, None, TOKENS, TOKENS, device="cpu", BLOCK_SIZE=8)
    return {
        "mask": ({"mask": near}, None, near),
        "blocks": ({"blocks": blocks(*SPARSE)}, None, in_blocks),
        "BlockMask": ({"blocks": torch_mask}, None, near),
        "score_mod": ({"score_mod": leaning}, leaning, None),
        "attention": ({"attn": fa4flex.compile(leaning, near)}, leaning, near),
        "its layout": ({"attn": fa4flex.compile(leaning, near, layout="bshd")}, leaning, near),
    }


@pytest.mark.parametrize("name", compositions())
def test_compositions_agree_with_the_oracle(door: ModuleType, name: str) -> None:
    given, score, mask = compositions()[name]
    qkv = leaves()
    with door.fa4flex_attention(**given) as inside:
        agree(dispatched(*qkv), oracle(qkv, score, mask), qkv)
    assert inside.calls == 1


@pytest.mark.parametrize("name", ["mask", "blocks", "attention"])
def test_a_mask_of_the_model_hides_keys_besides(door: ModuleType, name: str) -> None:
    given, score, mask = compositions()[name]
    qkv = leaves()
    hidden = torch.rand(B, TOKENS) > 0.4

    def both(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return mask(b, h, q_idx, kv_idx) & hidden[b, kv_idx]

    def both_causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return mask(b, h, q_idx, kv_idx) & (q_idx >= kv_idx)

    with door.fa4flex_attention(**given):
        agree(dispatched(*qkv, attn_mask=hidden), oracle(qkv, score, both), qkv)
        agree(dispatched(*qkv, is_causal=True), oracle(qkv, score, both_causal), qkv)
        bias = torch.randn(B, 1, TOKENS, TOKENS, **DOUBLE)

        def biased(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return (s if score is None else score(s, b, h, q_idx, kv_idx)) + bias[b, 0, q_idx, kv_idx]

        agree(dispatched(*qkv, attn_mask=bias), oracle(qkv, biased, mask), (*qkv, bias))


@pytest.mark.parametrize("name", ["mask", "blocks", "BlockMask", "attention"])
def test_one_call_may_bring_its_own(door: ModuleType, name: str) -> None:
    """It comes as the layer's mask, which some models take from callers, or as the backend's arguments."""
    given, score, mask = compositions()[name]
    qkv = leaves()
    (own,) = given.values()
    agree(dispatched(*qkv, attn_mask=own), oracle(qkv, score, mask), qkv)
    agree(dispatched(*qkv, attention_kwargs=given), oracle(qkv, score, mask), qkv)
    with door.fa4flex_attention(score_mod=leaning):
        dispatched(*qkv)
        with pytest.raises(InputError, match="one composition"):
            dispatched(*qkv, attn_mask=own)


def test_the_innermost_composition_decides(door: ModuleType) -> None:
    qkv = leaves()
    with door.fa4flex_attention(mask=near):
        with door.fa4flex_attention(score_mod=leaning) as inner:
            agree(dispatched(*qkv), oracle(qkv, leaning), qkv)
        agree(dispatched(*qkv), oracle(qkv, None, near), qkv)
        assert inner.calls == 1
    agree(dispatched(*qkv), oracle(qkv), qkv)


def test_a_map_of_other_lengths_is_refused(door: ModuleType) -> None:
    with pytest.raises(InputError), door.fa4flex_attention(blocks=blocks(*SPARSE)):
        dispatched(*leaves(TEXT))


def test_compositions_that_make_no_sense(door: ModuleType) -> None:
    attend, attn = door.fa4flex_attention, fa4flex.compile(scale=2.0)
    with pytest.raises(InputError, match="one compiled attention"):
        attend(attn, mask=near)
    with pytest.raises(InputError, match="one compiled attention"):
        attend(near)
    with pytest.raises(InputError, match="unknown options colour"):
        attend(colour="red")
    with pytest.raises(InputError, match="layout="):
        attend(layout="bshd")
    for modules in ([], [3]):
        with pytest.raises(InputError, match="modules="):
            attend(mask=near, modules=modules)
    with attend(attn) as inside:
        with pytest.raises(InputError, match="entered already"), inside:
            pass
        with pytest.raises(InputError, match="one scale"):
            dispatched(*leaves(), scale=1.0)
        dispatched(*leaves())
    with pytest.raises(InputError, match="one dropout"), attend(dropout=0.5):
        dispatched(*leaves(), dropout_p=0.5)


def test_a_composition_that_no_call_used_is_told(door: ModuleType) -> None:
    with pytest.raises(UnsupportedError, match="no call of any layer ran"), door.fa4flex_attention(mask=near):
        dispatched(*leaves(), backend="native")
    with pytest.raises(ZeroDivisionError), door.fa4flex_attention(mask=near):
        _ = 1 / 0


# --- layers -------------------------------------------------------------------------------------------------


def dispatching(layer: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    return dispatch_attention_fn(q, k, v, attn_mask=mask, backend=layer._attention_backend)


class Dispatching:
    """A processor as newer models have them."""

    _attention_backend = None

    def __call__(self, layer: Any, x: Tensor, context: Tensor, mask: Any = None) -> Tensor:
        return dispatching(self, *layer.projected(x, context), mask).flatten(2)


class ByFunction:
    """A processor as older models have them."""

    def __call__(self, layer: Any, x: Tensor, context: Tensor, mask: Any = None) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in layer.projected(x, context))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


class ByItself:
    """A processor that computes attention itself."""

    def __call__(self, layer: Any, x: Tensor, context: Tensor, mask: Any = None) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in layer.projected(x, context))
        return ((q @ k.mT * WIDTH**-0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)


def model(*processors: Any, backend: str | None = "fa4flex") -> Any:
    """Layers of self-attention one after the other, and one of cross-attention after each."""
    from diffusers import ModelMixin
    from diffusers.models.attention import AttentionModuleMixin

    class Layer(nn.Module, AttentionModuleMixin):
        def __init__(self, processor: Any) -> None:
            super().__init__()
            self.project = nn.ModuleList(nn.Linear(HEADS * WIDTH, HEADS * WIDTH) for _ in range(3))
            self.processor = processor

        def projected(self, x: Tensor, context: Tensor) -> tuple[Tensor, ...]:
            given = (x, context, context)
            return tuple(p(y).view(B, -1, HEADS, WIDTH) for p, y in zip(self.project, given, strict=True))

        def forward(self, x: Tensor, context: Tensor | None = None, mask: Any = None) -> Tensor:
            return self.processor(self, x, x if context is None else context, mask)

    class Model(ModelMixin):
        checkpointed: bool | None = None

        def __init__(self) -> None:
            super().__init__()
            self.attn1 = nn.ModuleList(Layer(processor()) for processor in processors)
            self.attn2 = nn.ModuleList(Layer(processor()) for processor in processors)

        def forward(self, x: Tensor, text: Tensor) -> Tensor:
            for own, other in zip(self.attn1, self.attn2, strict=True):
                if self.checkpointed is None:
                    x = x + own(x)
                else:
                    x = x + checkpoint(own, x, use_reentrant=self.checkpointed)
                x = x + other(x, text)
            return x

    made = Model().double()
    if backend is not None:
        made.set_attention_backend(backend)
    return made


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(B, TOKENS, HEADS * WIDTH, **DOUBLE), torch.randn(B, TOKENS, HEADS * WIDTH, **DOUBLE)


KINDS = pytest.mark.parametrize("kind", [Dispatching, ByFunction])


@KINDS
def test_models_compute_what_they_did(door: ModuleType, kind: Any) -> None:
    given, made = inputs(), model(kind, kind, backend=None)
    expected = made(*given)
    made.set_attention_backend("fa4flex")
    with door.fa4flex_attention() as inside:
        agree(made(*given), expected, [*given, *made.parameters()])
    assert inside.calls == 4
    made.set_attention_backend("native")
    with pytest.raises(UnsupportedError), door.fa4flex_attention():
        torch.testing.assert_close(made(*given), expected)


@KINDS
def test_modules_get_a_composition_each(door: ModuleType, kind: Any) -> None:
    """Text is as long as the rest here, so that lengths do not tell layers apart."""
    x, text = inputs()
    made = model(kind, kind)
    first, second = made.attn1
    with (
        door.fa4flex_attention(score_mod=leaning),
        door.fa4flex_attention(blocks=blocks(*SPARSE), modules=[first]) as one,
        door.fa4flex_attention(mask=near, modules=[second]) as two,
    ):
        got = made(x, text)
    assert one.calls == two.calls == 1

    def layer(each: Any, x: Tensor, context: Tensor, *composition: Any) -> Tensor:
        return x + oracle(each.projected(x, context), *composition).flatten(2)

    expected = layer(first, x, x, None, in_blocks)
    expected = layer(made.attn2[0], expected, text, leaning)
    expected = layer(second, expected, expected, None, near)
    agree(got, layer(made.attn2[1], expected, text, leaning), [x, text, *made.parameters()])


def test_modules_may_be_those_around_layers(door: ModuleType) -> None:
    made = model(Dispatching, ByFunction)
    with door.fa4flex_attention(mask=near, modules=[made]) as inside:
        made(*inputs())
    assert inside.calls == 4
    other = door.fa4flex_attention(mask=near, modules=[model(Dispatching)])
    with pytest.raises(UnsupportedError, match="no call of its modules"), other:
        made(*inputs())


def test_an_error_inside_a_module_ends_its_composition(door: ModuleType) -> None:
    made = model(Dispatching)
    x, text = inputs()
    with door.fa4flex_attention(mask=near, modules=[*made.attn1]), door.fa4flex_attention() as rest:
        with pytest.raises(Exception, match="shapes cannot be multiplied"):
            made.attn1[0](x[..., 1:])
        made.attn1[0](x)
        made.attn2[0](x, text)
        assert rest.calls == 1


def test_models_that_would_ignore_it_are_refused(door: ModuleType) -> None:
    with pytest.raises(UnsupportedError, match="its layers have ByItself"):
        model(Dispatching, ByItself)
    with pytest.raises(UnsupportedError, match="no attention layers"):
        model()
    with pytest.raises(UnsupportedError, match="ByItself"):
        door.check(model(ByItself, backend=None))
    with pytest.raises(UnsupportedError, match="ByItself"):
        model(ByItself, backend=None).attn1[0].set_attention_backend("fa4flex")
    door.check(model(Dispatching, ByFunction, backend=None))


def test_a_single_layer_takes_the_name(door: ModuleType) -> None:
    made = model(ByFunction, ByFunction, backend=None)
    made.attn1[1].set_attention_backend("fa4flex")
    with door.fa4flex_attention(mask=near) as inside:
        made(*inputs())
    assert inside.calls == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers(door: ModuleType, reentrant: bool) -> None:
    """They run again in the backward pass, where the composition has to be the same."""
    made, given = model(Dispatching, Dispatching), inputs()
    with door.fa4flex_attention(mask=near):
        expected = [x.clone() for x in backward_of(made(*given), given)]
    made.checkpointed = reentrant
    with door.fa4flex_attention(mask=near):
        torch.testing.assert_close(backward_of(made(*given), given), expected)
    with door.fa4flex_attention(mask=near):
        out = made(*given)
    with pytest.raises(UnsupportedError, match="checkpointed layer"):
        out.sum().backward()
    backward_of(made(*given), given)  # a step without a composition is not told
    with door.fa4flex_attention(mask=near, modules=[*made.attn1]):
        torch.testing.assert_close(made(*given), made(*given))
        backward_of(made(*given), given)


def backward_of(out: Tensor, given: Any) -> list[Tensor]:
    for x in given:
        x.grad = None
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()
    return [x.grad for x in given]


@KINDS
@pytest.mark.slow
def test_compiled_models(door: ModuleType, kind: Any) -> None:
    """A composition reaches a compiled model; that of another step, and none, are other graphs."""
    made, given = model(kind), inputs()
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    for mask in (None, near, sliding_window(5)):
        if mask is None:
            torch.testing.assert_close(compiled(*given), made(*given))
            continue
        with door.fa4flex_attention(mask=mask):
            torch.testing.assert_close(compiled(*given), made(*given))
