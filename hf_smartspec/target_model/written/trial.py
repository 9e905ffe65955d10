"""Trials: whether a written-out decoder computes what the model's own forward does."""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from ...cpu.quantized import unrounded_tokens
from ...device import Wire
from ...drafts.tree import DraftTree
from ..attention.tree_attention import attention_configs, tree_attention_step
from ..cache.slot_cache import SlotCache
from ..forward.packed import PackedForward
from ..forward.rotary import forget_lengths
from ..layout.rows import RowInput
from ..layout.step_layout import StepLayout
from ..support.twin import TWIN_REACH, borders, float32_copy, small_twin
from .decoder import Tables, WrittenDecoder, run_layer
from .parts import CalledMLP
from .plan import UnknownStructureError, make_plan

_NUM_TOKENS = 24  # of the shorter text, where no border has to be passed
# How many times as far from float32 as the model's own layer a written-out one may be: half of the tokens, and nine of
# ten. In SmolLM2-135M half were 1.0 times as far; a scale that is 2 % wrong makes that 1.7, a swapped head 2.6. Single
# tokens may be far away where attention is steep.
_MOST_TYPICAL, _MOST_RARE = 1.4, 8.0
# What a layer rounds at least, of its output and in the dtype's eps; in float32, which no wider dtype is needed for, it
# is what sums in another order may differ by.
_LEAST_ROUNDING, _FLOAT32_ROUNDING = 0.25, 16.0
_MOST_HEAD = 16.0  # the same of embeddings and logits, which are computed from equal states


def check(model: PreTrainedModel, decoder: WrittenDecoder) -> None:
    """
    Compare a written-out decoder with the model's own forward, layer by layer, each from the model's own hidden states,
    so that rounding does not add up over layers. In half precision, rounding is measured: by how far the model's
    own layer is from itself in float32, which is a lot where attention is steep. In int8, tokens are not rounded
    meanwhile: one that falls to its next level changes every later token, of whichever of the two.

    Models with sliding windows and the like, and those in half precision, are tried in a small float32 twin
    first, over every length at which they change their ways.

    Raises:
        UnknownStructureError: where they differ, with the layer and by how much.
    """
    needs_twin = bool(borders(model.config.get_text_config(decoder=True))) or model.dtype != torch.float32
    if needs_twin:
        twin = small_twin(model)
        try:
            _check(twin, WrittenDecoder(make_plan(twin)[0]), TWIN_REACH)
        except UnknownStructureError as error:
            raise UnknownStructureError(f"in a small model of its kind, {error}") from error
    _check(model, decoder, _NUM_TOKENS)


@torch.no_grad()
def _check(model: PreTrainedModel, decoder: WrittenDecoder, num_tokens: int) -> None:
    forget_lengths(model)
    try:
        with unrounded_tokens():
            _Trial(model, decoder, num_tokens).run()
    finally:
        forget_lengths(model)


class _Call(NamedTuple):
    """One call of a layer by the model's own forward."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    x: torch.Tensor  # [N, hidden_size], what went in
    output: torch.Tensor  # [N, hidden_size]
    layout: StepLayout
    tables: Mapping[str | None, Tables]


class _Trial:
    """
    Two forwards of ragged rows, with drafts. What the model's own layers were called with is then given to the
    written-out layers, and in half precision to copies of the own layers in float32, one layer after the other: no
    more than one is ever held in float32.
    """

    def __init__(self, model: PreTrainedModel, decoder: WrittenDecoder, num_tokens: int):
        self.model, self.decoder, self.plan = model, decoder, decoder.plan
        self.is_coarse = model.dtype != torch.float32
        self.rounding = torch.finfo(model.dtype).eps * (_LEAST_ROUNDING if self.is_coarse else _FLOAT32_ROUNDING)
        self.lengths = num_tokens + 3, num_tokens
        self.forward = PackedForward(model, 2, 2 * num_tokens + 16, prefill_chunk=num_tokens)
        self.forward.wire = _LastingWire()
        self.configs = attention_configs(model)
        self.calls: defaultdict[int, list[_Call]] = defaultdict(list)  # by layer
        self.tables: Mapping[str | None, Tables] = {}  # of the latest forward
        self.output: torch.Tensor | None = None  # of the latest layer

    def run(self) -> None:
        size = self.model.config.get_text_config(decoder=True).vocab_size
        rng = np.random.default_rng(0)
        texts = self._likely(rng, [rng.integers(3, size, length) for length in self.lengths])
        rows = [self.forward.add() for _ in texts]
        for row in rows:
            row.ahead, row.least_length = max(self.lengths) - len(texts[row.slot]), max(self.lengths)
        tree = DraftTree(rng.choice(texts[0], 4), np.array([-1, 0, 0, 2]), np.ones(4, np.float32))
        chain = DraftTree.chain(rng.choice(texts[0], 2))
        with self._noting():
            for drafts in ((DraftTree.empty(), tree), (chain, chain)):
                inputs = [RowInput(row, text[row.length :], draft) for row, text, draft in zip(rows, texts, drafts)]
                self._compare_logits(self.forward.forward(inputs)[0])
                self.forward.commit(rows, [[]] * 2)
                texts = [np.append(text, text[0]) for text in texts]
        for index, layer in enumerate(self._layers()):
            self._compare_layer(index, layer)

    def _layers(self) -> Sequence[nn.Module]:
        decoder: Any = self.model.get_decoder()
        return decoder.layers[: len(self.plan.layers)]

    def _likely(self, rng: np.random.Generator, texts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Texts `[length]` of tokens that the model itself finds likely after those of random ones."""
        forward = PackedForward(self.model, 2, 2 * max(self.lengths))
        # Every token but the first is a draft, so that there are logits after each.
        inputs = [RowInput(forward.add(), text[:1], DraftTree.chain(text[1:])) for text in texts]
        logits, _ = forward.forward(inputs)
        likely = np.array([_sampled(line.float(), rng) for line in logits])  # one by one: vocabularies are large
        return np.split(likely, np.cumsum([len(text) for text in texts])[:-1])

    @contextmanager
    def _noting(self) -> Iterator[None]:
        with ExitStack() as stack:
            for index, layer in enumerate(self._layers()):
                stack.callback(layer.register_forward_hook(self._hook(index), with_kwargs=True).remove)
            yield

    def _hook(self, index: int) -> Callable[..., None]:
        thread = get_ident()

        def note(layer: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            if get_ident() == thread:  # else somebody else uses the model
                self._note(index, args, kwargs, _first(output)[0])

        return note

    def _note(self, index: int, args: tuple, kwargs: dict[str, Any], output: torch.Tensor) -> None:
        """Keep a call for later, and compare what comes before the layer: embeddings, or nothing."""
        layout = self.forward.cache.layout
        assert layout is not None
        x = (args[0] if args else kwargs["hidden_states"])[0]
        if index == 0:
            self.tables = self.decoder.tables(x, layout.positions)
            self._compare_directly("the embeddings", self.decoder.embed(layout.tokens), x)
        elif self.output is None or not torch.equal(x, self.output.to(x.device)):
            raise UnknownStructureError(f"something is computed between layers {index - 1} and {index}")
        self.output = output
        self.calls[index].append(_Call(args, kwargs, x, output, layout, self.tables))

    def _compare_layer(self, index: int, layer: nn.Module) -> None:
        # Keys and values of their own, in the places that the forward's cache has for them.
        written, wide, errors = _beside(self.forward.cache), _beside(self.forward.cache), []
        # The model's own configs, not copies, say how the copy attends.
        in_float32 = float32_copy(layer, self.configs) if self.is_coarse else None
        for call in self.calls.pop(index):
            written.layout = wide.layout = call.layout
            output = run_layer(self.plan.layers[index], call.x, call.layout, written.layer(index), call.tables)
            expected, unit = call.output, self._unit(call.output)
            if in_float32 is not None:
                expected = self._run_wide(in_float32, call, wide)
                unit = torch.maximum(unit, _distance(call.output, expected))
            errors.append((_distance(output, expected) / unit).cpu())
        self._judge(index, torch.cat(errors))

    def _unit(self, x: torch.Tensor) -> torch.Tensor:
        """How much states `[N, size]` are rounded at least, `[N]`."""
        return (x.norm(dim=-1, dtype=_wide(x)) * self.rounding).clamp_min(torch.finfo(torch.float32).tiny)

    def _run_wide(self, layer: nn.Module, call: _Call, cache: SlotCache) -> torch.Tensor:
        """
        Run a layer in float32, which tells how much the own layer's rounding changes: a lot where scores of attention
        are steep.
        """
        cast = _Cast(self.forward.cache, cache)
        kwargs = {name: cast(value) for name, value in call.kwargs.items()}
        with tree_attention_step(self.configs, call.layout):
            return _first(layer.forward(*map(cast, call.args), **kwargs))[0]

    def _compare_logits(self, own: torch.Tensor) -> None:
        layout = self.forward.cache.layout
        assert self.output is not None and layout is not None
        x = self.output if layout.kept is None else self.output[layout.kept]
        self._compare_directly("the logits", self.decoder.logits(self.plan.final_norm(x)), own)

    def _compare_directly(self, what: str, written: torch.Tensor, own: torch.Tensor) -> None:
        error = float((_distance(written, own) / self._unit(own)).max())
        if not error <= _MOST_HEAD:  # NaN included
            raise UnknownStructureError(f"{what} differ by {error:.3g} roundings (at most {_MOST_HEAD:g})")

    def _judge(self, index: int, errors: torch.Tensor) -> None:
        typical, rare = float(errors.median()), float(errors.quantile(0.9))
        # Rounding sends some tokens to other experts.
        is_far = not rare <= _MOST_RARE and not isinstance(self.plan.layers[index].mlp, CalledMLP)
        if is_far or not typical <= _MOST_TYPICAL:
            raise UnknownStructureError(
                f"layer {index} differs by {typical:.3g} roundings in half of the tokens (at most {_MOST_TYPICAL:g}), "
                f"by {rare:.3g} in a tenth (at most {_MOST_RARE:g})"
            )


class _LastingWire(Wire):
    """Sends every layout to memory of its own, since layers are compared after the last forward."""

    def send(self, tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        return Wire().send(tensors, device)


class _Cast:
    """Arguments of a layer in float32, with another cache."""

    def __init__(self, cache: SlotCache, other: SlotCache):
        self.cache, self.other = cache, other

    def __call__(self, value: Any) -> Any:
        if value is self.cache:
            return self.other
        if isinstance(value, torch.Tensor):
            return value.float() if value.is_floating_point() else value
        if isinstance(value, (tuple, list)):
            return type(value)(map(self, value))
        return value


def _sampled(scores: torch.Tensor, rng: np.random.Generator) -> int:
    """Draw a token by scores `[vocab_size]`, float32."""
    noise = torch.from_numpy(rng.gumbel(size=len(scores)).astype(np.float32))
    return int((scores + noise.to(scores.device)).argmax())


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _distance(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Of states `[N, size]`, `[N]`."""
    return (x.to(_wide(x)) - y).norm(dim=-1)


def _first(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output[0]


def _beside(cache: SlotCache) -> SlotCache:
    """A cache of the same rows, with memory of its own."""
    other = copy.copy(cache)
    other.layers = []
    return other
