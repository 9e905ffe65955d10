"""
Functions of transformers' modelling files that compute recurrent layers, and what replaces them in packed forwards, as
tree attention replaces attention functions. A layer is known by the functions that its forward calls. Where a forward
computes all by itself, it is replaced as a whole.
"""

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from threading import Lock
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear
from transformers import PreTrainedModel

from ...cpu.few_tokens import product
from ..compat import TESTED_MODEL_TYPES, modules_of
from .cache import StateCache
from .chosen import chosen_keys

_CONVOLUTION = "causal_conv1d_fn"
Place = tuple[Any, str]  # a modelling file's module or a layer's class, and the name of a function there


def _convolution(
    cache: StateCache,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Replace `causal_conv1d_fn`: inputs and outputs `[1, channels, N]`."""
    output = cache.convolve(hidden_states[0].T, weight, bias, activation)
    return output.to(hidden_states.dtype).T[None]


def _gated_delta_rule(
    cache: StateCache,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Replace the chunked form of the gated delta rule, whose decay is one number per head (Qwen3-Next, `g` of shape `[1,
    N, heads]`) or one per channel of the keys (Kimi Linear, `[1, N, heads, dk]`).
    """
    queries, keys, values, decay, betas = [item[0].float() for item in (query, key, value, g, beta)]
    scale, eps = queries.shape[-1] ** -0.5, 1e-6 if use_qk_l2norm_in_kernel else 0.0
    output = cache.scan(queries, keys, values, decay, betas, scale=scale, eps=eps)
    return output.to(query.dtype).contiguous()[None], output.new_empty(0)


def _state_space(
    cache: StateCache,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # noqa: N803
    B: torch.Tensor,  # noqa: N803
    C: torch.Tensor,  # noqa: N803
    D: torch.Tensor | None = None,  # noqa: N803
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Replace the chunked scan of Mamba-2: inputs `[1, N, heads, head_dim]`, B and C `[1, N, groups, dk]`. Its limits on
    time steps apply to prompts only, since transformers' form for single tokens has none (Nemotron-H).
    """
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = torch.nn.functional.softplus(dt)
    steps = dt[0].float()
    if tuple(dt_limit) != (0.0, float("inf")):
        steps = torch.where(cache.is_prompt()[:, None], steps.clamp(*dt_limit), steps)
    values = hidden_states[0].float()
    inputs = C[0].float(), B[0].float(), values * steps[..., None], A.float() * steps
    output = cache.scan(*inputs, None, is_transposed=True)
    if D is not None:
        output = output + D[:, None] * values
    return output.contiguous()[None], output.new_empty(0)


def _selective_scan(
    cache: StateCache,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # noqa: N803
    B: torch.Tensor,  # noqa: N803
    C: torch.Tensor,  # noqa: N803
    D: torch.Tensor | None = None,  # noqa: N803
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **kwargs: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Replace the scan of Mamba-1: inputs, outputs and z `[1, channels, N]`, A `[channels, n]`, B and C `[1, n, N]`."""
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[:, None]
    if delta_softplus:
        dt = torch.nn.functional.softplus(dt)
    steps = dt[0].T.float()
    queries, keys = C[0].T, B[0].T.float()
    output = cache.scan_diagonal(queries, keys, hidden_states[0].T.float() * steps, steps, A.float())
    output = output.to(C.dtype).T[None]
    if D is not None:
        output = output + hidden_states * D[:, None]
    if z is not None:
        output = output * torch.nn.functional.silu(z)
    return (output, output.new_empty(0)) if return_last_state else output


def _lightning_attention(
    cache: StateCache, layer: Any, /, hidden_states: torch.Tensor, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Replace the forward of layers of lightning attention (MiniMax), whose heads decay at fixed rates."""
    projected = layer.act_fn(layer.qkv_proj(hidden_states))[0].float()
    num_heads = layer.num_attention_heads
    query, key, value = projected.unflatten(1, (num_heads, -1)).split(layer.head_dim, dim=2)
    decay = -layer.slope_rate.float().view(1, num_heads).expand(len(query), -1)
    cache.enter(layer.layer_idx)
    output = layer.norm(cache.scan(query, key, value, decay, None).flatten(1).to(hidden_states.dtype)[None])
    return layer.out_proj(layer.output_gate(hidden_states).sigmoid() * output), None


def _recurrent_block(
    cache: StateCache, layer: Any, /, input_states: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Replace the forward of recurrent blocks (RecurrentGemma), which keep states in themselves."""
    cache.enter(layer)
    convolution = layer.conv_1d
    inputs = cache.convolve(layer.linear_x(input_states)[0], convolution.weight[:, 0], convolution.bias)
    # A copy: it sets its state, which a plain forward in another thread may be using.
    hidden_states = copy.copy(layer.rg_lru)(inputs.to(input_states.dtype)[None], position_ids)
    return layer.linear_out(hidden_states * layer.act_fn(layer.linear_y(input_states))), None


def _gated_recurrence(
    cache: StateCache,
    layer: Any,
    /,
    hidden_states: torch.Tensor,
    recurrent_gate: torch.Tensor,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Replace the recurrence of RG-LRU: inputs, outputs and gates `[1, N, channels]`, which are the decays."""
    decays = recurrent_gate[0].float().log()
    one, rates = decays.new_ones(len(decays), 1), decays.new_ones(decays.shape[1], 1)
    output = cache.scan_diagonal(one, one, hidden_states[0].float(), decays, rates)
    return output.to(hidden_states.dtype)[None], layer.recurrent_states


def _dilated_convolution(
    cache: StateCache, layer: Any, /, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Replace the short convolution of n-gram features (Qwen4-Exp), whose inputs lie `ngram_size` tokens apart."""
    weight, reach = layer.conv1d.weight[:, 0], layer.short_conv_state_len
    spread = weight.new_zeros(len(weight), reach + 1)
    spread[:, :: layer.conv1d.dilation[0]] = weight
    cache.enter(layer.layer_idx, 1)
    return cache.convolve(hidden_states[0], spread, None, "silu").to(hidden_states.dtype)[None]


class _Context(NamedTuple):
    """What n-gram embeddings read of a cache: the tokens before each token, `[N, context_len]`."""

    tokens: torch.Tensor

    def get_conv_state(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.tokens

    def update_conv_state(self, conv_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return conv_states


def _ngram_embedding(
    cache: StateCache, layer: Any, /, input_ids: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Replace the forward of n-gram embeddings (Qwen4-Exp): every token is a row of its own, after its ancestors."""
    cache.enter(layer.layer_idx, 2)
    tokens = cache.last_tokens(input_ids[0].long(), layer.ngram_size, layer.eos_token_id)
    forward = inspect.unwrap(type(layer).forward)
    return forward(layer, tokens[:, -1:], _Context(tokens[:, :-1])).transpose(0, 1)


def _indexer(
    cache: StateCache,
    layer: Any,
    /,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Replace the forward of indexers (Qwen4-Exp), whose choice tree attention reads from the layout."""
    assert cache.layout is not None, "a packed forward"
    cache.layout.chosen = chosen_keys(cache, layer, hidden_states, position_embeddings)
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=hidden_states.device)


def _unmasked(cache: StateCache, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """Replace `apply_mask_to_padding_states`, to which some models (Mamba-1) pass masks of any shape."""
    return hidden_states


def _linear(
    cache: StateCache, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Replace `torch.nn.functional.linear`: few tokens on a CPU by the product that is fastest."""
    kinds = torch.Tensor, torch.nn.Parameter
    is_own = type(weight) in kinds and type(bias) in (*kinds, type(None)) and not torch.is_autocast_enabled("cpu")
    if is_own and input.dim() > 1:
        return product(input.flatten(0, -2), weight, bias).view(*input.shape[:-1], len(weight))
    return linear(input, weight, bias)


_SCANS: dict[str, Callable] = {
    "torch_chunk_gated_delta_rule": _gated_delta_rule,
    "chunk_kimi_delta_attention": _gated_delta_rule,
    "mamba2_chunk_scan": _state_space,
    "mamba_selective_scan": _selective_scan,
}
_REPLACEMENTS: dict[str, Callable] = {
    _CONVOLUTION: _convolution,
    "apply_mask_to_padding_states": _unmasked,
    **_SCANS,
}
# Methods, and what replaces them, by what the forwards of their classes call.
_METHODS: dict[str, tuple[str, Callable]] = {
    "set_linear_cache": ("forward", _lightning_attention),
    "rg_lru": ("forward", _recurrent_block),
    "_rnn_scan": ("_rnn_scan", _gated_recurrence),
    "_short_conv": ("_short_conv", _dilated_convolution),
    "ngram_heads_vocab_sizes": ("forward", _ngram_embedding),
    "block_topk": ("forward", _indexer),
}
_BY_CHANNEL = 16  # tokens of a piece where every channel decays by itself: scores of pairs are kept per channel
_CHUNK = 64


class RecurrentLayers:
    """
    The recurrent layers of a model, all of known kinds.

    Args:
        replaced (dict): What replaces functions of modelling files and methods of layers.

    Attributes:
        chooses_keys (`bool`): Whether layers of attention choose keys for every query.
        chunk (`int`): Fed tokens that a recurrence runs at once.
        may_be_loaded (`bool`): Whether states in transformers' caches are of the forms that `StateCache` has.
    """

    def __init__(self, replaced: dict[Place, Callable]):
        self._replaced = replaced
        is_by_channel = any(name == "chunk_kimi_delta_attention" for _, name in replaced)
        self.chooses_keys = _indexer in replaced.values()
        self.chunk = _BY_CHANNEL if is_by_channel else _CHUNK
        self.may_be_loaded = set(replaced.values()) <= {_convolution, _unmasked, _gated_delta_rule, _linear}

    def step(self, cache: StateCache) -> AbstractContextManager[None]:
        """Within the context, let this thread's forwards of the model compute recurrent layers with a cache."""
        return _replacing({place: partial(replacement, cache) for place, replacement in self._replaced.items()})

    def as_written(self) -> AbstractContextManager[None]:
        """
        Within the context, let this thread compute functions of the modelling file as they are written there. Where
        packages of kernels are installed, these replace them, and round otherwise: products of float32 in TF32
        (flash-linear-attention).
        """
        files = {owner for owner, _ in self._replaced if inspect.ismodule(owner) and owner is not torch.nn.functional}
        functions = {(file, name): item for file in files for name, item in vars(file).items()}
        written = {place: inspect.unwrap(item) for place, item in functions.items() if inspect.isfunction(item)}
        return _replacing({place: item for place, item in written.items() if item is not functions[place]})


_running: ContextVar[Mapping[Place, Callable]] = ContextVar("smartspec_functions", default=MappingProxyType({}))
# Functions that some threads replace: by place, the number of these threads, and the function to restore.
_in_use: dict[Place, tuple[int, Callable]] = {}
_lock = Lock()


@contextmanager
def _replacing(replacements: Mapping[Place, Callable]) -> Iterator[None]:
    """Within the context, let this thread call these in place of functions; other threads may replace the same ones."""
    token = _running.set(replacements)
    with _lock:
        for owner, name in replacements:
            count, function = _in_use.get((owner, name), (0, vars(owner)[name]))
            _in_use[owner, name] = count + 1, function
            if not count:
                setattr(owner, name, _redirected((owner, name), function))
    try:
        yield
    finally:
        with _lock:
            for owner, name in replacements:
                count, function = _in_use.pop((owner, name))
                if count > 1:
                    _in_use[owner, name] = count - 1, function
                else:
                    setattr(owner, name, function)
        _running.reset(token)


def _redirected(place: Place, function: Callable) -> Callable:
    @wraps(function)
    def redirected(*args: Any, **kwargs: Any) -> Any:
        return _running.get().get(place, function)(*args, **kwargs)

    return redirected


def recurrent_layers(model: PreTrainedModel) -> RecurrentLayers | None:
    """Return the model's recurrent layers; None if it has none, or some of a kind that is not known."""
    if type(model).__module__.startswith("transformers.") and model.config.model_type in TESTED_MODEL_TYPES:
        return None  # these have layers of attention only: no call pays for a walk through their modules
    replaced: dict[Place, Callable] = {}
    for kind in {type(module) for module in modules_of(model)}:
        forward = inspect.unwrap(kind.forward)
        called = set(getattr(getattr(forward, "__code__", None), "co_names", ()))
        for name in called & _METHODS.keys():
            method, replacement = _METHODS[name]
            replaced[next(own for own in kind.__mro__ if method in vars(own)), method] = replacement
        if any(_METHODS[name][0] == "forward" for name in called & _METHODS.keys()):
            continue  # replaced as a whole
        needed = [{_CONVOLUTION}] if "update_conv_state" in called else []
        needed += [set(_SCANS)] if "update_recurrent_state" in called else []
        if not needed:
            continue
        owner = sys.modules[forward.__module__]
        found = called & _REPLACEMENTS.keys() & vars(owner).keys()  # not methods or attributes of these names
        if not all(found & names for names in needed):
            return None
        replaced |= {(owner, name): _REPLACEMENTS[name] for name in found}
    if replaced and model.device.type == "cpu":
        replaced[torch.nn.functional, "linear"] = _linear
    return RecurrentLayers(replaced) if replaced else None
