"""Choose how an engine runs its model: all requests in one forward, or row by row."""

from transformers import PreTrainedModel

from ...prepare.encoders import pads_outputs
from ...prepare.route import way_of
from ...target_model.model_state import warn_once
from ...target_model.recurrent.functions import recurrent_layers
from .base import RequestMemory
from .budget import Budget
from .encoded_memory import EncodedMemory
from .kv_memory import EngineMemory
from .row_memory import RowMemory
from .state_memory import StateMemory


def memory_of(model: PreTrainedModel, max_batch_size: int, budget: Budget) -> RequestMemory:
    """
    Return the memory that suits the model. A warning is logged if its requests run row by row.

    Raises:
        ValueError: for a model whose encoder does not read tokens.
    """
    has_encoder = model.config.is_encoder_decoder
    if has_encoder and model.main_input_name != "input_ids":
        raise ValueError(
            f"{type(model).__name__} has an encoder that reads `{model.main_input_name}`, but requests of an engine "
            "consist of token ids: use `model.generate(assistant=...)`, with a batch of any size."
        )
    way, reason = way_of(model)
    if way == "packed" and has_encoder and pads_outputs(model):
        way, reason = "rowwise", "its encoder pads its outputs"
    if way == "packed":
        packed = StateMemory if recurrent_layers(model) is not None else EngineMemory
        return (EncodedMemory if has_encoder else packed)(model, max_batch_size, budget)
    how = "row by row" if way == "rowwise" else "row by row and without speculation"
    warn_once(
        model,
        f"The engine decodes {type(model).__name__} {how}, since {reason}: every request has its own forward in every "
        "step, so that requests wait for one another, and prompts share no keys and values.",
    )
    return RowMemory(model, max_batch_size, budget)
