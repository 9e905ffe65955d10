"""
Rotary embeddings that depend on the length of the text ("longrope", "dynamic"): every token gets the frequencies that
it would get without speculation, in the step that computes it.

Without speculation, the longest row of a forward determines frequencies: the longest prompt those of all prompts, and
from there on one token more in every step (`seen_lengths`). In a packed forward rows are at different steps, and drafts
reach ahead.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from ...device import to_device
from ..compat import modules_of
from ..layout.rows import RowInput


class LengthwiseRotary:
    """
    The rotary embeddings of a model that depend on the length of the text; false where there are none.

    Attributes:
        border (`int`): Length up to which the embeddings do not depend on the text's length.
    """

    def __init__(self, model: PreTrainedModel):
        self.modules = lengthwise_modules(model)
        self.border = min(map(border, self.modules), default=0)
        # Copies, since dynamic frequencies are stored for the longest text so far.
        self._copies = {id(module): _copy(module) for module in self.modules}

    def __bool__(self) -> bool:
        return bool(self.modules)

    @contextmanager
    def step(self, lengths: np.ndarray) -> Iterator[None]:
        """
        Within the context, embed token i of this thread's forwards as in a text of `lengths[i]` tokens. Other threads'
        forwards are not affected.
        """
        token = _step.set((lengths, self._copies))
        with _lock:
            for module in self.modules:
                _replace_forward(module)
        try:
            yield
        finally:
            with _lock:
                for module in self.modules:
                    _restore_forward(module)
            _step.reset(token)


# The lengths `[N]` for this thread's forward, and copies of the modules, by id.
_step: ContextVar[tuple[np.ndarray, dict[int, nn.Module]] | None] = ContextVar("smartspec_lengths", default=None)

# Modules whose `forward` is replaced, by id: the number of threads, and the instance's own `forward`, if it had one.
_in_use: dict[int, tuple[int, Callable | None]] = {}
_lock = Lock()


def _replace_forward(module: nn.Module) -> None:
    count, own = _in_use.get(id(module), (0, module.__dict__.get("forward")))
    _in_use[id(module)] = (count + 1, own)
    if count == 0:
        module.forward = partial(_forward, module, module.forward)


def _restore_forward(module: nn.Module) -> None:
    count, own = _in_use.pop(id(module))
    if count > 1:
        _in_use[id(module)] = (count - 1, own)
    elif own is None:
        del module.forward
    else:
        module.forward = own


def _forward(
    module: nn.Module, original: Callable, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """
    Map position_ids `[..., N]` to embeddings `[..., N, dim]`, usually two of them, in place of a module's own forward.
    """
    step = _step.get()
    if step is None:
        return original(x, position_ids, *args, **kwargs)
    all_lengths, copies = step
    own = copies[id(module)]
    layer_type = args[0] if args else kwargs.get("layer_type")
    if layer_type not in _borders(module):  # other layers of the model have embeddings of another kind
        return original(x, position_ids, *args, **kwargs)
    lengths = _relevant(module, layer_type, all_lengths)
    embed = partial(_embed, own, x, args=args, kwargs=kwargs)
    distinct, group = np.unique(lengths, return_inverse=True)
    if len(distinct) == 1:
        return embed(position_ids, int(distinct[0]))
    order = np.argsort(group, kind="stable")
    index, back = to_device(np.stack([order, np.argsort(order)]), position_ids.device)
    parts = index.split(np.bincount(group).tolist())
    outputs: list[Any] = [embed(position_ids[..., part], int(length)) for part, length in zip(parts, distinct)]
    if isinstance(outputs[0], torch.Tensor):
        return torch.cat(outputs, dim=-2).index_select(-2, back)
    return tuple(torch.cat(items, dim=-2).index_select(-2, back) for items in zip(*outputs))


def _embed(
    module: nn.Module, x: torch.Tensor, position_ids: torch.Tensor, length: int, args: Any, kwargs: Any
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """
    Return the module's embeddings of positions in a text of `length` tokens; the module takes the length from the last
    position.
    """
    module(x, torch.zeros_like(position_ids[..., :1]), *args, **kwargs)  # resets frequencies of longer texts
    last = torch.full_like(position_ids[..., :1], length - 1)
    output = module(x, torch.cat([position_ids, last], dim=-1), *args, **kwargs)
    return output[..., :-1, :] if isinstance(output, torch.Tensor) else tuple(item[..., :-1, :] for item in output)


def _relevant(module: nn.Module, layer_type: str | None, lengths: np.ndarray) -> np.ndarray:
    """Return lengths that give the same embeddings, with as few distinct values as possible."""
    border = _borders(module)[layer_type]
    if "dynamic" in _rope_types(module)[layer_type]:
        return np.maximum(lengths, border)
    return np.where(lengths > border, lengths.max(), border)


def lengthwise_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules whose embeddings depend on the length of the text."""
    return [module for module in modules_of(model) if "rope_type" in vars(module) and depends_on_length(module)]


def depends_on_length(module: nn.Module) -> bool:
    """Return whether the module's embeddings depend on the length of the text; True where it does not say its type."""
    return "rope_type" not in vars(module) or any(map(_is_lengthwise, _rope_types(module).values()))


def _is_lengthwise(rope_type: Any) -> bool:
    return isinstance(rope_type, str) and ("dynamic" in rope_type or rope_type == "longrope")


def _rope_types(module: nn.Module) -> dict[str | None, Any]:
    """Return the kind of rotary embeddings by type of layer; under None where layers do not differ."""
    rope_type = vars(module).get("rope_type")  # `getattr` takes ten times as long where there is none, in every call
    return rope_type if isinstance(rope_type, dict) else {None: rope_type}


def border(module: nn.Module) -> int:
    """Return the length up to which the module's embeddings do not depend on the text's length."""
    return min(_borders(module).values())


def _borders(module: nn.Module) -> dict[str | None, int]:
    """Return the lengths up to which embeddings do not depend on the text's length, by type of layer."""
    borders: dict[str | None, int] = {}
    for layer_type, rope_type in _rope_types(module).items():
        if rope_type == "longrope":
            parameters: Any = module.config.rope_parameters  # type: ignore[union-attr]
            parameters = parameters if layer_type is None else parameters[layer_type]
            borders[layer_type] = parameters["original_max_position_embeddings"]
        elif _is_lengthwise(rope_type):
            borders[layer_type] = module.original_max_seq_len  # type: ignore[assignment]
    return borders


def seen_lengths(inputs: Sequence[RowInput], positions: np.ndarray) -> np.ndarray:
    """Return the length of the text in the step that would compute each token without speculation, `[N]`."""
    counts = [item.num_tokens for item in inputs]
    ahead = np.repeat([item.row.ahead for item in inputs], counts)
    least = np.repeat([item.row.least_length for item in inputs], counts)
    return np.maximum(positions + 1 + ahead, least)


@torch.no_grad()
def forget_lengths(model: PreTrainedModel) -> None:
    """
    Reset dynamic frequencies to those of a fresh model. They remain as the longest text so far has set them, so the
    next call's tokens would otherwise depend on the last one's.
    """
    for module in lengthwise_modules(model):
        x = next(module.buffers())
        start = torch.zeros(1, 1, dtype=torch.long, device=x.device)
        for layer_type, rope_type in _rope_types(module).items():
            if _is_lengthwise(rope_type):
                module(x, start, *(() if layer_type is None else (layer_type,)))


def _copy(module: nn.Module) -> nn.Module:
    own = copy.deepcopy(module)
    own.__dict__.pop("forward", None)  # another thread may have replaced it meanwhile
    return own
