"""Hidden states of a target, taken from its forwards by hooks that exist only while the states are needed."""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ...device import send_together
from ..compat import shared_value
from ..layout.rows import CacheRow, RowInput

_LISTS = ("layers", "h", "block", "blocks")  # names of decoders' lists of layers


class Piece(NamedTuple):
    """A row's share in one call of the model: all of its tokens, or a piece of a long feed."""

    states: dict[int, torch.Tensor]  # of all tokens of the call, [N, hidden_size] by layer
    lines: np.ndarray  # lines of the row's tokens, fed ones before nodes
    num_fed: int
    num_held: int = 0  # lines of the call's states, which are held for the row's


@dataclass(eq=False)
class FedStates:
    """Hidden states of one row's feed and draft, before it is known which nodes are accepted."""

    start: int  # position of the first token in the text
    pieces: list[Piece] = field(default_factory=list)
    num_fed: int = 0
    num_held: int = 0  # of all pieces

    def add(self, piece: Piece) -> None:
        self.pieces.append(piece)
        self.num_fed += piece.num_fed
        self.num_held += piece.num_held

    def continued(self, newer: "FedStates") -> "FedStates":
        """Return these, of feeds without drafts, and then those of a later forward, which may begin within them."""
        if newer.start <= self.start:
            return newer
        if newer.start < self.start + self.num_fed:
            kept = FedStates(self.start)
            for piece in self.pieces:
                # A piece without tokens would hold its states, and drop layers that it lacks from those of the others.
                if num := min(piece.num_fed, newer.start - kept.start - kept.num_fed):
                    kept.add(Piece(piece.states, piece.lines[:num], num, piece.num_held))
            return kept.continued(newer)
        self.pieces += newer.pieces
        self.num_fed += newer.num_fed
        self.num_held += newer.num_held
        return self

    def lines(self, path: Sequence[int], most: int) -> list[np.ndarray]:
        """
        Return the lines of the committed tokens in each piece: of the feed, then of the accepted nodes, `most` in all.
        """
        found = [piece.lines[: piece.num_fed] for piece in self.pieces]
        last = self.pieces[-1]
        if len(path):
            found[-1] = np.concatenate([found[-1], last.lines[last.num_fed :][list(path)]])
        if len(found) == 1:
            return [found[0][: max(most, 0)]]
        ends = np.cumsum([len(lines) for lines in found])
        return [lines[: max(most - (end - len(lines)), 0)] for lines, end in zip(found, ends.tolist())]


def select(rows: Sequence[tuple[FedStates, Sequence[int], int]]) -> list[dict[int, torch.Tensor]]:
    """
    Return the hidden states of some rows' committed tokens, as new tensors: one selection for each layer, for all rows
    together, also of many calls of the model.

    Args:
        rows (sequence): For each row, its fed states, the accepted nodes of its draft, and the number of tokens that
            count.

    Returns:
        list of `dict` of `int` to `torch.Tensor` of shape `[m, hidden_size]`: States by layer.
    """
    groups: dict[frozenset[int], list[int]] = {}
    for number, (fed, _, _) in enumerate(rows):
        # Steps also take the layers that other rows need, which come and go.
        kept = {id(piece.states): piece.states for piece in fed.pieces}.values()
        groups.setdefault(frozenset.intersection(*map(frozenset, kept)), []).append(number)
    found: list[dict[int, torch.Tensor]] = [{}] * len(rows)
    for layers, numbers in groups.items():
        for number, states in zip(numbers, _selected(layers, [rows[number] for number in numbers])):
            found[number] = states
    return found


def _selected(
    layers: Collection[int], rows: Sequence[tuple[FedStates, Sequence[int], int]]
) -> list[dict[int, torch.Tensor]]:
    """Return `select` of rows whose pieces all have these layers."""
    calls: dict[int, tuple[int, dict[int, torch.Tensor]]] = {}  # first line of each call among those of all, and states
    lines, num_lines = [], 0
    for fed, path, most in rows:
        for piece, committed in zip(fed.pieces, fed.lines(path, most)):
            if id(piece.states) not in calls:
                calls[id(piece.states)] = num_lines, piece.states
                num_lines += len(next(iter(piece.states.values()), ()))
            lines.append(committed + calls[id(piece.states)][0])
    ends = np.cumsum([len(fed.pieces) for fed, _, _ in rows]).tolist()
    pairs = zip([0, *ends], ends)
    own = [lines[start] if end == start + 1 else np.concatenate(lines[start:end]) for start, end in pairs]
    index, sizes, sent = torch.from_numpy(np.concatenate(own)), list(map(len, own)), {}
    chosen: dict[int, Sequence[torch.Tensor]] = {}
    for layer in layers:
        parts = [states[layer] for _, states in calls.values()]
        states, device = torch.cat(parts) if len(parts) > 1 else parts[0], parts[0].device
        if device not in sent:  # usually one
            (sent[device],) = send_together([index], device)
        chosen[layer] = states.index_select(0, sent[device]).split_with_sizes(sizes)  # faster than `[]` and `split`
    return [{layer: items[number] for layer, items in chosen.items()} for number in range(len(rows))]


class HiddenStateTaps:
    """
    Hooks that take hidden states of chosen layers from the forwards of a model.

    Args:
        model (`PreTrainedModel`): The target.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.layers: frozenset[int] = frozenset()  # layers that are taken now
        self._states: dict[int, torch.Tensor] = {}  # of the latest call of the model
        self._fed: dict[CacheRow, FedStates] = {}

    def check(self, layers: Collection[int]) -> None:
        """
        Check that the model has hidden states of these layers.

        Args:
            layers (collection of `int`): See `TreeCandidateGenerator.hidden_layers`.

        Raises:
            ValueError: if the model has no such layers, or its decoder's layers are not found, or these pass on
                several streams of states (Qwen4-Exp).
        """
        num = len(self._decoder()[1])
        wrong = [layer for layer in layers if not -1 <= layer <= num]
        if wrong:
            raise ValueError(
                f"{type(self.model).__name__} has hidden states after 0 to {num} layers, and -1 after its norm; "
                f"not {wrong}"
            )
        num_streams = shared_value(self.model.config.get_text_config(decoder=True), "hc_count") or 1
        if num_streams > 1 and set(layers) - {-1}:  # drafters read one state of `hidden_size` per layer
            raise ValueError(
                f"layers of {type(self.model).__name__} pass on {num_streams} streams of hidden states, and one only "
                f"after its norm (-1), not after {sorted(set(layers) - {-1})}"
            )

    def _decoder(self) -> tuple[torch.nn.Module, torch.nn.ModuleList]:
        """Return the decoder that the model names, or else its body, with the list of its layers."""
        for decoder in (self.model.get_decoder(), self.model.base_model, *self.model.children()):
            for name in _LISTS:
                layers = getattr(decoder, name, None)
                if isinstance(layers, torch.nn.ModuleList):
                    return decoder, layers
        raise ValueError(f"{type(self.model).__name__} has no decoder with layers under a known name {list(_LISTS)}")

    @contextmanager
    def taking(self, layers: Collection[int]) -> Iterator[Mapping[CacheRow, FedStates]]:
        """
        Within the context, keep the hidden states of every row that is fed, unless a layer's states are not to be had.
        The model's own forward stores them only within `installed()`, too; a written-out decoder passes them to `keep`.
        Without `layers`, no states are kept.
        """
        self.layers, self._states, self._fed = frozenset(layers), {}, {}
        try:
            yield self._fed
        finally:
            self.layers, self._states, self._fed = frozenset(), {}, {}

    @property
    def is_taking(self) -> bool:
        return bool(self.layers)

    def keep(self, layer: int, states: torch.Tensor) -> None:
        """Store a layer's hidden states `[N, hidden_size]`, from a forward that does not run the model's modules."""
        if layer in self.layers:
            self._states[layer] = states

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within the context, let the model's own forward store its hidden states here."""
        handles = self._install() if self.layers else []
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _install(self) -> list[RemovableHandle]:
        decoder, layers = self._decoder()
        thread = threading.get_ident()  # the model may serve other threads meanwhile

        def keep(layer: int, states: Any) -> None:
            if threading.get_ident() == thread and isinstance(states, torch.Tensor) and states.dim() == 3:
                self._states[layer] = states[0]

        return [self._hook(layer, keep, decoder, layers) for layer in self.layers]

    @staticmethod
    def _hook(
        layer: int, keep: Callable[[int, Any], None], decoder: torch.nn.Module, layers: torch.nn.ModuleList
    ) -> RemovableHandle:
        if layer == -1:
            return decoder.register_forward_hook(lambda module, args, output: keep(layer, _first(output)))
        if layer == len(layers):
            return layers[-1].register_forward_hook(lambda module, args, output: keep(layer, _first(output)))
        return layers[layer].register_forward_pre_hook(  # another thread may call it half registered: without `kwargs`
            lambda module, args, kwargs={}: keep(layer, args[0] if args else kwargs.get("hidden_states")),
            with_kwargs=True,
        )

    def note(self, items: Sequence[RowInput], lines: np.ndarray | None = None) -> None:
        """
        Assign the states of the latest call of the model to rows, before the rows count its tokens: these rows' tokens
        one after the other, or, for a single row, the tokens at `lines`.
        """
        if not self.layers:
            return
        states, self._states = self._states, {}
        sizes = [item.num_tokens for item in items]
        num_lines = sum(sizes) if lines is None else int(lines[-1]) + 1
        if states.keys() != self.layers or any([item.shape[0] < num_lines for item in states.values()]):
            return
        lines = np.arange(num_lines) if lines is None else lines
        if any([item.shape[0] > num_lines for item in states.values()]):  # a layout's padding
            states = {layer: item[:num_lines] for layer, item in states.items()}
        first = 0
        for item, size in zip(items, sizes):
            piece = Piece(states, lines[first : first + size], len(item.feed), num_lines)
            first += size
            fed = self._fed.get(item.row)
            if fed is None:
                fed = self._fed[item.row] = FedStates(item.row.length)
            fed.add(piece)


def _first(output: Any) -> Any:
    """Return the hidden states of a module's output: its first item, or the output itself."""
    return output[0] if isinstance(output, tuple | list | ModelOutput) and len(output) else output
