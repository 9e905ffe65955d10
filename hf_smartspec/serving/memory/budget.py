"""The bound on the memory of an engine's keys and values."""

from typing import NamedTuple

from transformers import PreTrainedModel

from ...target_model.cache.free_memory import free_bytes
from ...target_model.compat import num_positions
from ...target_model.forward.ranks import broadcast_from_rank0

_ENOUGH = 2**28  # bytes that models of short texts may take, too
_KEPT = 2  # times the need of a full batch of the longest texts: half of it is left for kept prefixes


class Budget(NamedTuple):
    """
    Bound on keys and values.

    Args:
        max_bytes (`int`, *optional*): The bound. Default: half of a GPU's free memory, a quarter of a CPU's, but no
            more than twice what a full batch of the longest texts takes (256 MiB where that is less).
        num_sharing (`int`): Engines that share this memory; the default is divided among them.
        max_tokens (`int`, *optional*): The bound in tokens of all texts together, where keys and values grow with them.
        drafting (`int`): Bytes of keys and values of drafters, per token of a text; the bound holds for both models'
            (SmartSpec, section 6: each has a slot for every token).
        states (`int`): Bytes of drafters' states, per request.
    """

    max_bytes: int | None = None
    num_sharing: int = 1
    max_tokens: int | None = None
    drafting: int = 0
    states: int = 0

    def bytes_for(self, model: PreTrainedModel, max_batch_size: int, bytes_per_token: int) -> int:
        """
        Return the bound in bytes, the same for all processes that hold the model.

        Args:
            max_batch_size (`int`): Requests that run at once.
            bytes_per_token (`int`): The model's keys and values of a token; 0 where they do not grow with the text.
        """
        if self.max_tokens is not None and bytes_per_token:
            return self.max_tokens * (bytes_per_token + self.drafting)
        if self.max_bytes is not None:
            return self.max_bytes
        free = broadcast_from_rank0(model, lambda: free_bytes(model.device))
        part = free // ((2 if model.device.type == "cuda" else 4) * self.num_sharing)
        longest = num_positions(model.config.get_text_config(decoder=True))
        if longest is None:
            return part
        return min(part, max(_KEPT * max_batch_size * longest * (bytes_per_token + self.drafting), _ENOUGH))
