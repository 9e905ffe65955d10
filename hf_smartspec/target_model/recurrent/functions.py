"""
Functions of transformers' modelling files that compute recurrent layers, and what replaces them in packed forwards, as
tree attention replaces attention functions. A layer is known by the functions that its forward calls.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from threading import Lock
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from ..compat import TESTED_MODEL_TYPES, modules_of
from .cache import StateCache

_CONVOLUTION = "causal_conv1d_fn"


def _convolution(
    cache: StateCache,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Replace `causal_conv1d_fn`: inputs and outputs `[1, channels, N]`."""
    output = cache.convolve(hidden_states[0].T, weight, bias)
    if activation is not None:
        output = ACT2FN[activation](output)
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
    if use_qk_l2norm_in_kernel:
        queries, keys = [item * torch.rsqrt((item * item).sum(-1, keepdim=True) + 1e-6) for item in (queries, keys)]
    queries = queries * queries.shape[-1] ** -0.5
    if (groups := values.shape[1] // keys.shape[1]) > 1:
        queries, keys = [item.repeat_interleave(groups, dim=1) for item in (queries, keys)]
    output = cache.scan(queries, keys, values, decay, betas)
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
    groups = values.shape[1] // B.shape[2]
    keys, queries = [item[0].float().repeat_interleave(groups, dim=1) for item in (B, C)]
    output = cache.scan(queries, keys, values * steps[..., None], A.float() * steps, None, is_transposed=True)
    if D is not None:
        output = output + D[:, None] * values
    return output.contiguous()[None], output.new_empty(0)


_SCANS: dict[str, Callable] = {
    "torch_chunk_gated_delta_rule": _gated_delta_rule,
    "chunk_kimi_delta_attention": _gated_delta_rule,
    "mamba2_chunk_scan": _state_space,
}
_REPLACEMENTS = {_CONVOLUTION: _convolution, **_SCANS}
_BY_CHANNEL = 16  # tokens of a piece where every channel decays by itself: scores of pairs are kept per channel
_CHUNK = 64


class RecurrentLayers:
    """
    The recurrent layers of a model, all of known kinds.

    Args:
        modules (list of dict): The global variables of the modelling files in which functions are replaced, with the
            names of these.
    """

    def __init__(self, modules: list[tuple[dict[str, Any], set[str]]]):
        self._modules = modules
        names = set().union(*[names for _, names in modules])
        self.chunk = _BY_CHANNEL if "chunk_kimi_delta_attention" in names else _CHUNK

    @contextmanager
    def step(self, cache: StateCache) -> Iterator[None]:
        """Within the context, let this thread's forwards of the model compute recurrent layers with a cache."""
        token = _running.set(cache)
        with _lock:
            for own, names in self._modules:
                for name in names:
                    count, function = _in_use.get((id(own), name), (0, own[name]))
                    _in_use[id(own), name] = count + 1, function
                    own[name] = _redirected(function, _REPLACEMENTS[name]) if not count else own[name]
        try:
            yield
        finally:
            with _lock:
                for own, names in self._modules:
                    for name in names:
                        count, function = _in_use.pop((id(own), name))
                        if count > 1:
                            _in_use[id(own), name] = count - 1, function
                        else:
                            own[name] = function
            _running.reset(token)


_running: ContextVar[StateCache | None] = ContextVar("smartspec_states", default=None)
# Functions in use by packed forwards, by file and name: the number of forwards, and the function to restore.
_in_use: dict[tuple[int, str], tuple[int, Callable]] = {}
_lock = Lock()


def _redirected(function: Callable, replacement: Callable) -> Callable:
    @wraps(function)
    def redirected(*args: Any, **kwargs: Any) -> Any:
        cache = _running.get()
        return function(*args, **kwargs) if cache is None else replacement(cache, *args, **kwargs)

    return redirected


def recurrent_layers(model: PreTrainedModel) -> RecurrentLayers | None:
    """Return the model's recurrent layers; None if it has none, or some of a kind that is not known."""
    if type(model).__module__.startswith("transformers.") and model.config.model_type in TESTED_MODEL_TYPES:
        return None  # these have layers of attention only: no call pays for a walk through their modules
    found: dict[int, tuple[dict[str, Any], set[str]]] = {}
    for kind in {type(module) for module in modules_of(model)}:
        forward = inspect.unwrap(kind.forward)
        called = set(getattr(getattr(forward, "__code__", None), "co_names", ()))
        needed = [{_CONVOLUTION}] if "update_conv_state" in called else []
        needed += [set(_SCANS)] if "update_recurrent_state" in called else []
        if not needed:
            continue
        own = forward.__globals__
        replaced = called & set(_REPLACEMENTS) & own.keys()  # not methods or attributes of these names
        if not all(replaced & names for names in needed):
            return None
        found.setdefault(id(own), (own, set()))[1].update(replaced)
    return RecurrentLayers(list(found.values())) if found else None
