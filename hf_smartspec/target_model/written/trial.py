"""Trials: comparison of a written-out decoder with the model's own forward."""

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
from ...device import StagingBuffer
from ...drafts.tree import DraftTree
from ..attention.tree_attention import attention_configs, tree_attention_step
from ..cache.slot_cache import SlotCache
from ..forward.packed import PackedForward
from ..forward.rotary import forget_lengths
from ..layout.rows import RowInput
from ..layout.step_layout import StepLayout
from ..recurrent.cache import StateCache
from ..recurrent.step import RecurrentStep
from ..support.twin import TWIN_REACH, borders, float32_copy, small_twin
from .decoder import Tables, WrittenDecoder, run_layer
from .experts import Experts
from .mixed_mlps import MixedMLP
from .mlps import CalledMLP
from .placeholders import placeholder_tokens
from .plan import UnknownStructureError
from .recognition import layers_of, make_plan

_NUM_TOKENS = 24  # tokens of the shorter text, where no border has to be passed
# Largest error of a written-out layer relative to that of the model's own, both against float32: for half of the
# tokens, and for nine of ten. In SmolLM2-135M the median was 1.0; a scale that is 2 % wrong makes it 1.7, a swapped
# head 2.6. Single tokens may have large errors where attention is steep.
_MOST_TYPICAL, _MOST_RARE = 1.4, 8.0
# Least rounding error of a layer, relative to its output, in the dtype's eps. In float32, for which no wider dtype is
# needed, it bounds the difference between sums in another order.
_LEAST_ROUNDING, _FLOAT32_ROUNDING = 0.25, 16.0
_MOST_HEAD = 16.0  # the same for embeddings and logits, which are computed from equal states

_OTHERS = CalledMLP, Experts, MixedMLP  # which rounding changes more than others

Memories = tuple[torch.Tensor, ...]  # keys and values of a layer
_SHARED = "shared_kv_states"  # the argument of layers that holds these
Shared = dict[str, Memories]  # by type of layer, those that later layers attend to


def check(model: PreTrainedModel, decoder: WrittenDecoder) -> None:
    """
    Compare a written-out decoder with the model's own forward, layer by layer, each from the model's own hidden states,
    so that rounding does not add up over layers. In half precision, rounding is measured as the distance of the model's
    own layer from the same layer in float32, which is large where attention is steep. In int8, tokens are not rounded
    meanwhile: a number that falls to the next level in one of the two would change every later token.

    Models with sliding windows and the like, and those in half precision, are tried in a small float32 twin first, past
    every length at which their behaviour changes.

    Raises:
        UnknownStructureError: if the two differ, with the layer and by how much.
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
    known = decoder.plan.positions
    if known is not None and known.num < 2 * num_tokens:
        raise UnknownStructureError(f"only {known.num} positions")
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
    x: torch.Tensor  # [N, hidden_size], the input
    output: torch.Tensor  # [N, hidden_size]
    layout: StepLayout
    step: RecurrentStep | None  # where the cache has states
    tables: Mapping[str | None, Tables]
    inputs: torch.Tensor | None  # [N, num_layers, size], of layers


class _Trial:
    """
    Two forwards of ragged rows, with drafts. The inputs of the model's own layers are then passed to the written-out
    layers, and in half precision to copies of the own layers in float32, one layer after the other, so that only one is
    held in float32.
    """

    def __init__(self, model: PreTrainedModel, decoder: WrittenDecoder, num_tokens: int):
        self.model, self.decoder, self.plan = model, decoder, decoder.plan
        self.is_coarse = model.dtype != torch.float32
        self.rounding = torch.finfo(model.dtype).eps * (_LEAST_ROUNDING if self.is_coarse else _FLOAT32_ROUNDING)
        self.lengths = num_tokens + 3, num_tokens
        self.forward = PackedForward(model, 2, 2 * num_tokens + 16, prefill_chunk=num_tokens)
        self.forward.staging = _LastingBuffer()
        self.configs = attention_configs(model)
        self.calls: defaultdict[int, list[_Call]] = defaultdict(list)  # by layer
        self.tables: Mapping[str | None, Tables] = {}  # of the latest forward
        self.inputs: torch.Tensor | None = None
        self.stored: defaultdict[int, list[Memories]] = defaultdict(list)  # by layer, of each call
        self.shared: defaultdict[int, Shared] = defaultdict(dict)  # by call, what layers in float32 pass on
        self.output: torch.Tensor | None = None  # of the latest layer

    def run(self) -> None:
        size = self.model.config.get_text_config(decoder=True).vocab_size
        rng = np.random.default_rng(0)
        texts = self._likely(rng, [rng.integers(3, size, length) for length in self.lengths])
        # Some models embed other tokens in the place of these.
        tokens = [token for token in placeholder_tokens(self.model) if token < size]
        texts[0][1 : 1 + len(tokens)] = tokens
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
        return list(layers_of(self.model.get_decoder()))[: len(self.plan.layers)]

    def _likely(self, rng: np.random.Generator, texts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return texts `[length]` of tokens that the model itself finds likely after random ones."""
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
            if get_ident() == thread:  # other threads may use the model
                self._note(index, args, kwargs, _first(output)[0])

        return note

    def _note(self, index: int, args: tuple, kwargs: dict[str, Any], output: torch.Tensor) -> None:
        """
        Keep a call for later, and compare the layer's input with the embeddings, or with the output of the layer
        before.
        """
        layout = self.forward.cache.layout
        assert layout is not None
        x = (args[0] if args else kwargs["hidden_states"])[0]
        if index == 0:
            self.tables = self.decoder.tables(x, layout.positions)
            tokens = self.decoder.read(layout.tokens)
            self.inputs = self.decoder.layer_inputs(tokens, x)
            self._compare_directly("the embeddings", self.decoder.embed(tokens, layout.positions), x)
        elif self.output is None or not torch.equal(x, self.output.to(x.device)):
            raise UnknownStructureError(f"values are computed between layers {index - 1} and {index}")
        if self.inputs is not None:
            own = args[1] if len(args) > 1 else kwargs["per_layer_input"]
            self._compare_directly(f"the inputs of layer {index}", self.inputs[:, index], own[0])
        self.output = output
        cache = self.forward.cache
        step = cache.step if isinstance(cache, StateCache) else None
        self.calls[index].append(_Call(args, kwargs, x, output, layout, step, self.tables, self.inputs))

    def _compare_layer(self, index: int, layer: nn.Module) -> None:
        # Keys and values of their own, in the places that the forward's cache has for them.
        written, wide, errors = _beside(self.forward.cache), _beside(self.forward.cache), []
        # The copy shares the model's own configs, which select how it attends.
        in_float32 = float32_copy(layer, self.configs) if self.is_coarse else None
        plan = self.plan.layers[index]
        source = index if plan.source is None else plan.source
        for number, call in enumerate(self.calls.pop(index)):
            written.layout = wide.layout = call.layout
            if isinstance(written, StateCache) and call.step is not None:
                written.begin(call.step.inputs, call.x.device)
                written.step.num_prompt = call.step.num_prompt  # the rows are longer by now
            if plan.source is not None:
                written.layer(source).hold(*self.stored[source][number])
            own = None if call.inputs is None else call.inputs[:, index]
            output = run_layer(plan, call.x, call.layout, written.layer(source), call.tables, None, own)
            expected, unit = call.output, self._unit(call.output)
            if in_float32 is not None:
                expected = self._run_wide(in_float32, call, wide, self.shared[number])
                unit = torch.maximum(unit, _distance(call.output, expected))
            errors.append((_distance(output, expected) / unit).cpu())
            if any(other.source == index for other in self.plan.layers):
                self.stored[index].append(_copied(written.layer(index).memories))
        self._judge(index, torch.cat(errors))

    def _unit(self, x: torch.Tensor) -> torch.Tensor:
        """Return the least rounding error of states `[N, size]`, `[N]`."""
        return (x.norm(dim=-1, dtype=_wide(x)) * self.rounding).clamp_min(torch.finfo(torch.float32).tiny)

    def _run_wide(self, layer: nn.Module, call: _Call, cache: SlotCache, shared: Shared) -> torch.Tensor:
        """
        Run a layer in float32, which shows how much the own layer's rounding changes: a lot where attention is steep.
        It may add to the keys and values that layers share.
        """
        cast, before = _Cast(self.forward.cache, cache), dict(shared)
        kwargs = {name: shared if name == _SHARED else cast(value) for name, value in call.kwargs.items()}
        with tree_attention_step(self.configs, call.layout):
            output = _first(layer.forward(*map(cast, call.args), **kwargs))[0]
        shared |= {name: _copied(item) for name, item in shared.items() if item is not before.get(name)}
        return output

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
        # Rounding in half precision sends some tokens to other experts.
        may_differ = isinstance(self.plan.layers[index].mlp, _OTHERS if self.is_coarse else CalledMLP)
        is_far = not rare <= _MOST_RARE and not may_differ
        if is_far or not typical <= _MOST_TYPICAL:
            raise UnknownStructureError(
                f"layer {index} differs by {typical:.3g} roundings in half of the tokens (at most {_MOST_TYPICAL:g}), "
                f"by {rare:.3g} in a tenth (at most {_MOST_RARE:g})"
            )


class _LastingBuffer(StagingBuffer):
    """Staging buffer that keeps every layout in memory of its own, since layers are compared after the last forward."""

    def send(self, tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        return StagingBuffer().send(tensors, device)


class _Cast:
    """Conversion of a layer's arguments to float32, with another cache."""

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
    """Return the distances between states `[N, size]`, `[N]`."""
    return (x.to(_wide(x)) - y).norm(dim=-1)


def _first(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output[0]


def _copied(memories: Sequence[torch.Tensor]) -> Memories:
    """Return copies of keys and values, to whose lines later calls write."""
    return tuple(memory.clone() for memory in memories)


def _beside(cache: SlotCache) -> SlotCache:
    """Return a cache of the same rows, with memory of its own."""
    other = copy.copy(cache)
    other.layers = []
    if isinstance(other, StateCache):
        other.forget()
    return other
