"""How an engine runs its model: all requests together, or one by one."""

from transformers import PreTrainedModel

from ..prepare.model_state import warn_once
from ..prepare.route import way_of
from .kv_memory import EngineMemory
from .memory import RequestMemory
from .row_memory import RowMemory


def memory_of(model: PreTrainedModel, max_batch_size: int, max_bytes: int | None) -> RequestMemory:
    """
    The memory for an engine's requests, by what the model can do; a warning says where they run one by one.

    Raises:
        ValueError: for a model whose requests an engine cannot take: its encoder reads no tokens.
    """
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{type(model).__name__} has an encoder, and requests of an engine bring nothing for it to read: "
            "use `model.generate(assistant=...)`, with a batch of any size."
        )
    way, reason = way_of(model)
    if way == "packed":
        return EngineMemory(model, max_batch_size, max_bytes)
    how = "row by row" if way == "rowwise" else "row by row and without speculation"
    warn_once(
        model,
        f"The engine decodes {type(model).__name__} {how}, since {reason}: every request takes a forward of its own at "
        "every step, so that requests wait for one another, and share nothing of their prompts.",
    )
    return RowMemory(model, max_batch_size, max_bytes)
