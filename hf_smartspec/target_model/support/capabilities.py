"""
Capabilities of a model: whether trees can be packed in its forward, and whether its rows can run chains one by one.
"""

from contextlib import suppress
from itertools import chain
from threading import Lock

import torch
from transformers import PreTrainedModel

from ...device import without_autocast
from ..compat import (
    TESTED_ENCODED_TYPES,
    TESTED_MODEL_TYPES,
    TESTED_ROWWISE_TYPES,
    drops_soft_caps,
    is_stateful,
    modules_of,
    shared_value,
)
from ..forward.packed import PackedForward
from ..forward.rowwise import RowwiseForward
from ..model_state import state_of
from ..private import TRANSFORMERS, is_newer
from ..recurrent.functions import recurrent_layers
from .probe import Probe, agrees_with_encoder
from .twin import TWIN_REACH, borders, float32_copy, small_twin

Way = type[PackedForward] | type[RowwiseForward]

_SMALL = 5_000_000  # parameters of models that are probed past their own borders, where these are near
_NEAR = 32  # tokens
_COPIED = 2**28  # parameters of models in half precision that are copied to float32, 1 GiB, if they have no twin
_SHORT = 6  # tokens after the prompts of short texts

_lock = Lock()  # probes switch a model's training mode, and restore it


def prepares_own_inputs(model: PreTrainedModel) -> bool:
    """
    Return whether a forward is fed more than the tokens that it is asked for, which the packed forward would not do.
    """
    own = vars(model).get("prepare_inputs_for_generation")
    if own is None:
        function = type(model).prepare_inputs_for_generation  # type: ignore[attr-defined]
        return not function.__module__.startswith("transformers.")
    # PEFT's wrappers set theirs for the time of the call; only adapters that learn prompts change the inputs.
    peft_config = getattr(getattr(own, "__self__", None), "active_peft_config", None)
    return getattr(peft_config, "is_prompt_learning", True)


def can_pack(model: PreTrainedModel) -> bool:
    """Return whether draft trees can be packed in the model's forward."""
    return packing_obstacle(model) is None


def packing_obstacle(model: PreTrainedModel, is_padded: bool = False) -> str | None:
    """
    Return why draft trees cannot be packed in the model's forward; None if they can: by its type, else by comparing
    small forwards, once per model.

    Args:
        is_padded (`bool`): Whether rows of different lengths would be padded without speculation.
    """
    if is_stateful(model) and recurrent_layers(model) is None:
        return f"{type(model).__name__} keeps a state that cannot be taken back to an earlier token"
    if prepares_own_inputs(model):
        return f"the attention of {type(model).__name__} cannot be packed"
    parameters = chain.from_iterable(module._parameters.values() for module in modules_of(model))
    devices = {parameter.device for parameter in parameters if parameter is not None} | {model.device}
    if len(devices) > 1 or model.device.type == "meta":
        return "the model is spread over devices or offloaded"  # one step's indices and masks lie on one device
    if drops_soft_caps(model):
        return f"transformers {TRANSFORMERS} leaves the soft caps of {type(model).__name__} out"
    if model.config.is_encoder_decoder:
        return _encoded_obstacle(model)
    if model.config.model_type in TESTED_MODEL_TYPES and _is_usual(model):
        return None
    reason = _probed(model, PackedForward, is_padded=False)
    return reason or (_probed(model, PackedForward, is_padded=True) if is_padded else None)


def _encoded_obstacle(model: PreTrainedModel) -> str | None:
    """Return the same for a decoder with cross attention, whose rows the caller of `generate` pads with care."""
    if model.config.model_type in TESTED_ENCODED_TYPES and _is_usual(model):
        return None
    if model.main_input_name != "input_ids":  # speech and images in, text out: no input to probe with
        return f"the decoder of {type(model).__name__} has not been tried out"
    if found := borders(model.config.get_text_config(decoder=True)):
        return f"what the decoder of {type(model).__name__} does after {_names(found)} tokens has not been tried out"
    return _probed(model, PackedForward, is_padded=False)


def rowwise_obstacle(model: PreTrainedModel) -> str | None:
    """
    Return why the model cannot run several tokens of a row at once and take them back; None if it can: by its type,
    else by comparing small forwards, once per model. It cannot if it looks ahead (BERT without `is_decoder`), has no
    cache (GPT-1), feeds its cache one token at a time (ProphetNet), or chooses what it attends to by the tokens that
    are run together (DeepSeek 3.2).
    """
    is_tested = model.config.model_type in TESTED_ROWWISE_TYPES and _is_usual(model)
    if is_tested or model.main_input_name != "input_ids":  # speech and images in, text out: no input to probe with
        return None
    return _probed(model, RowwiseForward, is_padded=True)


def _is_usual(model: PreTrainedModel) -> bool:
    """Return whether the model is transformers' own, of a tested release, with types of layers that the tests cover."""
    if is_newer():
        return False
    layer_types = shared_value(model.config.get_text_config(decoder=True), "layer_types")
    known = {"full_attention", "sliding_attention", "chunked_attention"}
    return set(layer_types or ()) <= known and type(model).__module__.startswith("transformers.")


def _probed(model: PreTrainedModel, way: Way, is_padded: bool) -> str | None:
    """Return why a model cannot be run in some way, alone or in padded batches; None if it can. It is probed once."""
    with _lock:
        found = state_of(model).obstacles
        if (way, is_padded) not in found:
            with without_autocast(model.device):  # the result is remembered for calls outside it, too
                found[way, is_padded] = _probe(model, way, is_padded)
        return found[way, is_padded]


def _probe(model: PreTrainedModel, way: Way, is_padded: bool) -> str | None:
    """
    Compare with decoding token by token: short texts in the model itself, and texts past every length at which its
    behaviour changes, in a small twin where these lengths, or the model, are large. Models in half precision are
    compared within rounding, which adds up over their layers; their twins, or copies, in float32 exactly.
    """
    name, is_coarse = type(model).__name__, model.dtype != torch.float32
    cannot = f"{name} cannot run several tokens at once and take them back"
    if way is PackedForward:
        cannot = f"{name} pads rows in its own way" if is_padded else f"the attention of {name} cannot be packed"
    is_encoded = model.config.is_encoder_decoder
    found = {} if is_encoded else borders(model.config.get_text_config(decoder=True))
    near = {key: value for key, value in found.items() if value <= _NEAR}
    prompt_lens = (4, 7) if is_padded else (7,)

    def agrees(subject: PreTrainedModel, num_tokens: int) -> bool:
        return agrees_with_encoder(subject, way) if is_encoded else Probe(subject, prompt_lens, num_tokens).agrees(way)

    if not agrees(model, _SHORT):
        return _at_borders(name, near) if near and way is RowwiseForward else cannot
    if not found and not is_coarse:
        return None
    reach = max(near.values(), default=0) + _SHORT if len(near) == len(found) else None
    exact = _exact_subject(model, reach)
    if exact is None:
        what = f"does after {_names(found)} tokens" if found else f"computes in {model.dtype}"
        return f"what {name} {what} cannot be tried out"
    if agrees(*exact):
        return None
    return _at_borders(name, found) if found else cannot


def _exact_subject(model: PreTrainedModel, reach: int | None) -> tuple[PreTrainedModel, int] | None:
    """
    Return a model in float32 to compare in place of a large one or one in half precision, and the number of tokens
    after its prompts: the model itself, its small twin, or a copy. None if none of these is possible.

    Args:
        reach (`int`, *optional*): Tokens that lead the model itself across its borders, where these are near.
    """
    is_coarse = model.dtype != torch.float32
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if reach is not None and not is_coarse and num_parameters <= _SMALL:
        return model, reach
    with suppress(Exception):  # sizes that depend on one another in unknown ways
        return small_twin(model), TWIN_REACH
    if reach is not None and is_coarse and num_parameters <= _COPIED:
        with suppress(Exception):  # too little memory, parts that cannot be copied
            return float32_copy(model), reach
    return None


def _at_borders(name: str, found: dict[str, int]) -> str:
    return f"{name} does not compute several tokens at once as one at a time, after {_names(found)} tokens"


def _names(found: dict[str, int]) -> str:
    return " or ".join(f"`{key}={value}`" for key, value in found.items())
