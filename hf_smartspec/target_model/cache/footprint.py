"""Memory that transformers' own caches take."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from ..compat import CACHE_NAMES

_LENGTHS = 1, 2  # tokens of the texts by which caches are measured


def num_bytes(item: Any) -> int:
    """Return the bytes of all tensors in a cache of any kind; each storage counts whole, and once."""
    storages = {storage.data_ptr(): storage.nbytes() for storage in _storages(item, set())}
    return sum(storages.values())


def _storages(item: Any, seen: set[int]) -> Iterable[torch.UntypedStorage]:
    if isinstance(item, torch.Tensor):
        yield item.untyped_storage()
        return
    if id(item) in seen or isinstance(item, str | torch.nn.Module):
        return
    seen.add(id(item))
    if isinstance(item, dict):
        parts = list(item.values())
    elif isinstance(item, list | tuple | set):
        parts = list(item)
    else:
        parts = list(getattr(item, "__dict__", {}).values())
    for part in parts:
        yield from _storages(part, seen)


def caches_in(kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the caches among a forward's outputs or arguments."""
    return [kwargs[name] for name in CACHE_NAMES if name in kwargs]


class Footprint(NamedTuple):
    """
    Memory of the cache of one text, extrapolated from very short texts, so that the savings of windows are left aside.

    Args:
        state (`int`): Bytes that do not depend on the text's length.
        per_token (`int`): Bytes of every token.
        per_encoded (`int`): Bytes of every token that an encoder has read, the encoder's output included.
    """

    state: int
    per_token: int
    per_encoded: int = 0

    def of_text(self, num_tokens: int, num_encoded: int = 0) -> int:
        return self.state + num_tokens * self.per_token + num_encoded * self.per_encoded

    @classmethod
    @torch.no_grad()
    def of(cls, model: PreTrainedModel) -> "Footprint":
        """Measure a model by two or three short forwards; zeros for models without a cache."""
        if not model.config.is_encoder_decoder:
            shorter, longer = (_bytes_of(model, length) for length in _LENGTHS)
            return cls(max(2 * shorter - longer, 0), max(longer - shorter, 0))
        shortest, wider, longer = (_bytes_with_encoder(model, *lengths) for lengths in ((1, 1), (2, 1), (1, 2)))
        steps = wider - shortest, longer - shortest
        return cls(max(shortest - sum(steps), 0), steps[1], steps[0])


def _bytes_of(model: PreTrainedModel, length: int) -> int:
    ids = torch.zeros(1, length, dtype=torch.long, device=model.device)
    return num_bytes(caches_in(model(input_ids=ids, use_cache=True, return_dict=True)))


def _bytes_with_encoder(model: PreTrainedModel, num_encoded: int, length: int) -> int:
    """Return the same for a decoder that attends to an encoder's outputs of `num_encoded` tokens."""
    ids = torch.zeros(1, max(num_encoded, length), dtype=torch.long, device=model.device)
    output = model(input_ids=ids[:, :num_encoded], decoder_input_ids=ids[:, :length], use_cache=True, return_dict=True)
    return num_bytes([*caches_in(output), output.encoder_last_hidden_state])
