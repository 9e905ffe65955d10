"""Tree attention over the slot cache: packed queries in, padded `scaled_dot_product_attention`, packed output out."""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from threading import Lock
from typing import Any, cast

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...cpu.attention import can_attend, few_token_attention
from ..compat import modules_of, shared_value
from ..forward_code import mentions
from ..layout.step_layout import PaddedPart, StepLayout
from .folding import fold, unfold, unpad
from .seen_lines import has_few_tokens, lines_of
from .shared_attention import part_with_sinks, shared_attention
from .varlen import is_trusted, judge, kind_of, varlen_attention

PREFIX = "smartspec_tree_"

# The layout reaches the attention function by context, not as a forward keyword: some models (stablelm) do not pass
# keywords on to their attention, and a context variable keeps other threads' forwards apart.
_layout: ContextVar[StepLayout | None] = ContextVar("smartspec_layout", default=None)

# Arguments of attention functions that change the result, and that tree attention does not support.
_UNSUPPORTED = ("position_bias", "alibi", "head_mask", "sinks", "indices", "topk_indices", "block_bias")


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    replaces: str,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """
    Attention function for transformers' `AttentionInterface`.

    Args:
        query (`torch.Tensor` of shape `[1, heads, N, head_dim]`): Queries of all rows, packed.
        key, value (`torch.Tensor` of shape `[1, kv_heads, lines, head_dim]`): Memory, as `SlotLayer.update` returns it.
        replaces (`str`): The implementation to call outside packed steps (in another thread's forward).
        s_aux (`torch.Tensor` of shape `[heads]`, *optional*): Sinks, see `packed_attention`.

    Returns:
        The output of shape `[1, N, heads, head_dim]`, and None for the weights.

    Raises:
        NotImplementedError: if an argument is given that tree attention does not support.
    """
    layout = _layout.get()
    if layout is None:
        function = _plain_function(module, replaces)
        kwargs |= {"scaling": scaling, "dropout": dropout, "softcap": softcap, "sliding_window": sliding_window}
        kwargs |= {} if s_aux is None else {"s_aux": s_aux}
        return function(module, query, key, value, attention_mask, **kwargs)
    encoded = layout.encoded
    position_bias = None if encoded is None else kwargs.pop("position_bias", None)
    unsupported = [name for name in _UNSUPPORTED if kwargs.get(name) is not None]
    if unsupported:
        raise NotImplementedError(f"Tree attention does not support the arguments {unsupported}.")

    options: dict[str, Any] = {
        "window": layer_window(module, sliding_window), "scaling": scaling, "softcap": softcap, "dropout": dropout,
    }  # fmt: skip
    options |= {} if s_aux is None else {"sinks": s_aux}
    packed = query[0].transpose(0, 1)
    if encoded is not None:
        if s_aux is not None:
            raise NotImplementedError("Tree attention does not support sinks after an encoder.")
        return encoded.attend(module, packed, key, value, layout, position_bias, **options)[None], None
    chosen, layout.chosen = layout.chosen, None
    if chosen is not None:
        options["bias"] = dict(zip(layout.parts, chosen)).__getitem__
    output = packed_attention(packed, key[0].transpose(0, 1), value[0].transpose(0, 1), layout, **options)
    return output[None], None


def packed_attention(
    packed: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: StepLayout,
    window: int | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    bias: Callable[[PaddedPart], torch.Tensor] | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Compute the attention of a packed step.

    Args:
        packed (`torch.Tensor` of shape `[N, heads, head_dim]`): Queries of all rows.
        key, value (`torch.Tensor` of shape `[lines, kv_heads, head_dim]`): Memory, as `SlotLayer.write` returns it.
        window (`int`, *optional*): Length of the sliding window.
        bias (`Callable`, *optional*): Returns the summand of a part's scores, `[R, heads, S, K]`; `[R, 1, S, K]` for
            all heads.
        sinks (`torch.Tensor` of shape `[heads]`, *optional*): Logits that join the scores of each head in the softmax,
            and have no value.

    Returns:
        `torch.Tensor` of shape `[N, heads, head_dim]`.

    Raises:
        NotImplementedError: for sinks beside a soft cap or bias.
    """
    if sinks is not None and not (softcap is None and bias is None):
        raise NotImplementedError("Tree attention does not support sinks beside a soft cap or bias.")
    if layout.shared:
        assert window is None and softcap is None and bias is None, "such models share no prefixes (`shares_prefixes`)"
        return shared_attention(packed, key, value, layout, scaling, dropout, sinks)
    is_plain = softcap is None and bias is None and sinks is None and not dropout
    kind = kind_of(packed, key, value, layout, window) if is_plain else None
    if kind is None:
        return _masked_attention(packed, key, value, layout, window, scaling, softcap, dropout, bias, sinks)
    trusted = is_trusted(kind)
    if trusted:
        return varlen_attention(packed, key, value, layout, window, scaling)
    expected = _masked_attention(packed, key, value, layout, window, scaling)
    if trusted is None:
        judge(kind, partial(varlen_attention, packed, key, value, layout, window, scaling), expected)
    return expected


def _masked_attention(
    packed: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: StepLayout,
    window: int | None,
    scaling: float | None,
    softcap: float | None = None,
    dropout: float = 0.0,
    bias: Callable[[PaddedPart], torch.Tensor] | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `packed_attention` by padded rectangles and masks."""
    is_plain = bias is None and not dropout and can_attend(packed, key, value, scaling, sinks)
    have_few = [is_plain and has_few_tokens(part, window, packed.dtype) for part in layout.parts]
    if all(have_few):
        return few_token_attention(packed, key, value, lines_of(layout, layout.parts, window), scaling, sinks, softcap)
    outputs = []
    for part, has_few in zip(layout.parts, have_few):
        own = packed if len(layout.parts) == 1 else packed[part.tokens]
        if has_few:
            seen = lines_of(layout, [part], window)
            outputs.append(few_token_attention(own, key, value, seen, scaling, sinks, softcap))
            continue
        if sinks is not None:
            outputs.append(part_with_sinks(own, key, value, part, window, scaling, dropout, sinks))
            continue
        added = None if bias is None else bias(part)
        outputs.append(unpad(attend_part(own, key, value, part, window, scaling, softcap, dropout, added), part))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def attend_part(
    packed: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    part: PaddedPart,
    window: int | None,
    scaling: float | None,
    softcap: float | None = None,
    dropout: float = 0.0,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Compute the attention of one part, `[R * S, heads, head_dim]`, whose queries are gathered from the packed ones. A
    `bias` `[R, heads, S, K]` is for heads that are not grouped; one for all heads, `[R, 1, S, K]`, for any.
    """
    num_heads, kv_heads = packed.shape[1], key.shape[1]
    groups = num_heads // kv_heads
    folded = fold(packed, part, kv_heads)
    keys, values = part.view(key), part.view(value)
    mask = part.mask(window, groups, packed.dtype)
    if bias is not None:
        if groups > 1:
            assert bias.shape[1] == 1, "biases of grouped heads"
            bias = bias.repeat_interleave(groups, dim=2)
        mask = bias if mask is None else bias + mask
    if softcap is None:
        output = _attention(folded, keys, values, mask, dropout, scaling)
    else:
        output = _softcapped_attention(folded, keys, values, mask, softcap, scaling, dropout)
    return unfold(output, part, num_heads)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    # On CPUs, a single query of half precision takes several times as long as two.
    is_slow = query.shape[2] == 1 and query.dtype.itemsize == 2 and query.device.type == "cpu"
    if is_slow:
        query = query.repeat(1, 1, 2, 1)
    output = scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)
    return output[:, :, :1] if is_slow else output


def layer_window(module: torch.nn.Module, argument: int | None) -> int | None:
    """
    Return the layer's sliding window. Where the config lists every layer's type, models build masks by that list, and
    may not pass the window to the attention function (Qwen2-MoE does not). Where transformers' own attention does not
    read the config's window, masks may have it nevertheless (PhiMoE). Some files ignore the list (Mistral).
    """
    config: Any = getattr(module, "config", None)
    layer_idx = getattr(module, "layer_idx", None)
    layer_types, kind = getattr(config, "layer_types", None), cast(Any, type(module))
    if not layer_types or not isinstance(layer_idx, int) or _ignores_types(kind):
        is_of_masks = argument is None and config is not None and _leaves_windows_to_masks(kind)
        return shared_value(config, "sliding_window") if is_of_masks else argument
    return getattr(config, "sliding_window", argument) if layer_types[layer_idx] == "sliding_attention" else None


@cache
def _ignores_types(kind: type[torch.nn.Module]) -> bool:
    """Return whether a kind of transformers' attention is of a file that does not read the types of layers."""
    if not kind.__module__.startswith("transformers."):
        return False
    return "layer_types" not in inspect.getsource(sys.modules[kind.__module__])


@cache
def _leaves_windows_to_masks(kind: type[torch.nn.Module]) -> bool:
    """
    Return whether a kind of transformers' attention reads no window, and its file makes masks that have one. Most files
    make none, whatever the config says (Llama).
    """
    if not kind.__module__.startswith("transformers.") or "sliding_window" in mentions(kind):
        return False
    return hasattr(sys.modules[kind.__module__], "create_sliding_window_causal_mask")


def _softcapped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    softcap: float,
    scaling: float | None,
    dropout: float,
) -> torch.Tensor:
    """
    Compute attention with scores squashed to (-softcap, softcap) before the mask, as in Gemma 2; softmax in float32.
    """
    scores = torch.matmul(query, key.transpose(2, 3)) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(torch.dropout(weights, dropout, dropout > 0), value)


def _plain_function(module: torch.nn.Module, implementation: str) -> Callable:
    # "eager" is not in the interface: every modelling file has its own function.
    default: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(implementation, default)


def _plain_mask(*args: Any, replaces: str, **kwargs: Any) -> Any:
    return ALL_MASK_ATTENTION_FUNCTIONS[replaces](*args, **kwargs)


def _registered(implementation: str) -> str:
    """Return the name of tree attention in place of `implementation`, registered at first use."""
    name = PREFIX + implementation
    if name not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(name, partial(tree_attention, replaces=implementation))
        AttentionMaskInterface.register(name, partial(_plain_mask, replaces=implementation))
    return name


def attention_configs(model: torch.nn.Module) -> list[PreTrainedConfig]:
    """Return the distinct configs from which the model's modules read their attention implementation."""
    configs = (vars(module).get("config") for module in modules_of(model))
    return list({id(config): config for config in configs if isinstance(config, PreTrainedConfig)}.values())


# Configs in use by packed forwards, by id: the number of forwards, and the implementation to restore after the last.
_in_use: dict[int, tuple[int, str]] = {}
_lock = Lock()


@contextmanager
def tree_attention_step(configs: list[PreTrainedConfig], layout: StepLayout) -> Iterator[None]:
    """
    Within the context, let this thread's forwards of a model with these configs attend by `layout`. Meanwhile, other
    threads may run packed forwards of the same model, or its own, which then bypass the layout.
    """
    token = _layout.set(layout)
    with _lock:
        for config in configs:
            count, previous = _in_use.get(id(config), (0, config._attn_implementation_internal))
            if previous is not None:
                _in_use[id(config)] = (count + 1, previous)
                config._attn_implementation_internal = _registered(previous)
    try:
        yield
    finally:
        with _lock:
            for config in configs:
                if id(config) in _in_use:
                    count, previous = _in_use.pop(id(config))
                    if count > 1:
                        _in_use[id(config)] = (count - 1, previous)
                    else:
                        config._attn_implementation_internal = previous
        _layout.reset(token)
