"""Trials: whether a written-out decoder computes what the model's own forward does."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from ...drafts.tree import DraftTree
from ..layout import StepLayout
from ..packed import PackedForward
from ..quantized import unrounded_tokens
from ..rotary import forget_lengths
from ..rows import RowInput
from ..slot_cache import SlotCache
from ..twin import TWIN_REACH, borders, small_twin
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


class _Trial:
    """Two forwards of ragged rows, with drafts, whose layers' inputs are given to the written-out layers too."""

    def __init__(self, model: PreTrainedModel, decoder: WrittenDecoder, num_tokens: int):
        self.model, self.decoder, self.plan = model, decoder, decoder.plan
        self.is_coarse = model.dtype != torch.float32
        self.rounding = torch.finfo(model.dtype).eps * (_LEAST_ROUNDING if self.is_coarse else _FLOAT32_ROUNDING)
        self.lengths = num_tokens + 3, num_tokens
        self.forward = PackedForward(model, 2, 2 * num_tokens + 16, prefill_chunk=num_tokens)
        # Keys and values of their own, in the places that the forward's cache has for them.
        self.written, self.wide = _beside(self.forward.cache), _beside(self.forward.cache)
        self.tables: Mapping[str | None, Tables] = {}
        self.output: torch.Tensor | None = None  # of the latest layer
        self.errors: dict[int, list[torch.Tensor]] = {}  # by layer, in roundings, of each token

    def run(self) -> None:
        size = self.model.config.get_text_config(decoder=True).vocab_size
        rng = np.random.default_rng(0)
        texts = self._likely(rng, [rng.integers(3, size, length) for length in self.lengths])
        rows = [self.forward.add() for _ in texts]
        for row in rows:
            row.ahead, row.least_length = max(self.lengths) - len(texts[row.slot]), max(self.lengths)
        tree = DraftTree(rng.choice(texts[0], 4), np.array([-1, 0, 0, 2]), np.ones(4, np.float32))
        chain = DraftTree.chain(rng.choice(texts[0], 2))
        with self._compared():
            for drafts in ((DraftTree.empty(), tree), (chain, chain)):
                inputs = [RowInput(row, text[row.length :], draft) for row, text, draft in zip(rows, texts, drafts)]
                self._compare_logits(self.forward.forward(inputs)[0])
                self.forward.commit(rows, [[]] * 2)
                texts = [np.append(text, text[0]) for text in texts]
        for index, errors in self.errors.items():
            self._judge(index, torch.cat(errors))

    def _likely(self, rng: np.random.Generator, texts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Texts `[length]` of tokens that the model itself finds likely after those of random ones."""
        forward = PackedForward(self.model, 2, 2 * max(self.lengths))
        # Every token but the first is a draft, so that there are logits after each.
        inputs = [RowInput(forward.add(), text[:1], DraftTree.chain(text[1:])) for text in texts]
        logits, _ = forward.forward(inputs)
        noise = torch.from_numpy(rng.gumbel(size=tuple(logits.shape)).astype(np.float32)).to(logits.device)
        likely = (logits.float() + noise).argmax(-1).cpu().numpy()
        return np.split(likely, np.cumsum([len(text) for text in texts])[:-1])

    @contextmanager
    def _compared(self) -> Iterator[None]:
        decoder: Any = self.model.get_decoder()
        with ExitStack() as stack:
            for index, layer in enumerate(decoder.layers[: len(self.plan.layers)]):
                stack.callback(layer.register_forward_hook(self._hook(index), with_kwargs=True).remove)
            yield

    def _hook(self, index: int) -> Callable[..., None]:
        thread = get_ident()

        def compare(layer: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            if get_ident() != thread:  # somebody else uses the model
                return
            x = args[0] if args else kwargs["hidden_states"]
            self._compare_layer(index, x[0], _first(output)[0], lambda: self._run_wide(layer, args, kwargs))

        return compare

    def _compare_layer(
        self, index: int, x: torch.Tensor, own: torch.Tensor, run_wide: Callable[[], torch.Tensor]
    ) -> None:
        """
        Args:
            x, own (`torch.Tensor` of shape `[N, hidden_size]`): Input and output of the model's own layer.
            run_wide (`Callable`): Gives the output of the model's own layer in float32.
        """
        layout = self.forward.cache.layout
        assert layout is not None
        if index == 0:
            self._begin(layout, x)
        elif self.output is None or not torch.equal(x, self.output.to(x.device)):
            raise UnknownStructureError(f"something is computed between layers {index - 1} and {index}")
        self.output = own
        written = run_layer(self.plan.layers[index], x, layout, self.written.layer(index), self.tables)
        unit, expected = self._unit(own), own
        if self.is_coarse:
            expected = run_wide()
            unit = torch.maximum(unit, _distance(own, expected))
        self.errors.setdefault(index, []).append((_distance(written, expected) / unit).cpu())

    def _unit(self, x: torch.Tensor) -> torch.Tensor:
        """How much states `[N, size]` are rounded at least, `[N]`."""
        return (x.norm(dim=-1, dtype=_wide(x)) * self.rounding).clamp_min(torch.finfo(torch.float32).tiny)

    def _begin(self, layout: StepLayout, x: torch.Tensor) -> None:
        self.written.layout = self.wide.layout = layout
        self.tables = self.decoder.tables(x, layout.positions)
        self._compare_directly("the embeddings", self.decoder.embed(layout.tokens), x)

    def _run_wide(self, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
        """
        Run a copy of the model's own layer in float32, which tells how much the layer's own rounding changes: a lot
        where scores of attention are steep.
        """
        cast = _Cast(self.forward.cache, self.wide)
        wide = copy.deepcopy(layer).float()
        # `forward`, past the hooks, of which the copy has its own.
        return _first(wide.forward(*map(cast, args), **{name: cast(value) for name, value in kwargs.items()}))[0]

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
