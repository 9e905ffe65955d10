"""Norms of a written-out layer."""

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.functional import layer_norm

from ...cpu.kernels.norms import CENTERED, CENTERED_SHIFTED, ONCE, PLAIN, SHIFTED
from ...cpu.norms import can_norm, few_token_norm
from ...gpu import elementwise
from .parts import Called, Map, Weighted

_EPS = ("variance_epsilon", "eps")  # its names in norms
_CONSTANTS = 1e-5, 1e-6  # what it may be in norms that have no such name
_norms: dict[tuple, int | None] = {}  # forms by kind, eps and dtype; None for unknown ones


class Norm(Weighted):
    """
    RMS or layer norms over the last dimension, rounded where the model's own norm rounds.

    Args:
        eps (`float`): Added to the mean square, or to the variance where the mean is subtracted.
        form (`int`): `PLAIN`, `ONCE`, `SHIFTED` (Gemma), `CENTERED` or `CENTERED_SHIFTED` (Nemotron), as in
            `few_token_norm`.
    """

    def __init__(self, module: nn.Module, eps: float, form: int):
        super().__init__(module)
        self.eps, self.form = eps, form
        self.shape = tuple(module.weight.shape)  # type: ignore[arg-type]

    def weights(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the weight, and the bias if there is one."""
        parameters = self._parameters()
        return parameters["weight"], parameters.get("bias")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weights()
        if can_norm(x, weight, bias):
            return few_token_norm(x, weight, bias, self.eps, self.form)
        if self.form in (PLAIN, SHIFTED) and elementwise.can_norm(x, weight):
            return elementwise.rms_norm(x, weight, self.eps, self.form == SHIFTED)
        return self.by_torch(x)

    def by_torch(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weights()
        if self.form >= CENTERED:
            factor = weight if self.form == CENTERED else weight + 1.0
            return layer_norm(x, self.shape, factor, bias, self.eps)
        if self.form == PLAIN:
            return torch.rms_norm(x, self.shape, None, self.eps).mul_(weight)
        factor = weight.float() if self.form == ONCE else weight.float() + 1.0
        return torch.rms_norm(x.float(), self.shape, factor, self.eps).to(x.dtype)


class UnweightedNorm(Norm):
    """
    Norms without a weight, in whose place ones of its own change no bit.

    Args:
        like (`torch.Tensor` of shape `[size]`): A tensor with the dtype and device of these.
    """

    def __init__(self, module: nn.Module, eps: float, form: int, like: torch.Tensor):
        Weighted.__init__(self, module)
        self.eps, self.form, self.shape = eps, form, tuple(like.shape)
        with torch.inference_mode(False):
            self._ones = torch.ones_like(like, requires_grad=False)

    def weights(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._ones, None


@torch.no_grad()
def unweighted_norm(module: nn.Module, like: torch.Tensor) -> Map:
    """
    Return a norm without a weight, of vectors like this one, found by trying it; a norm of an unknown kind is called as
    it is.
    """
    if has_parameters(module):
        return Called(module)
    own, numbers = _eps_of(module), torch.rand(3, len(like), generator=torch.Generator().manual_seed(0)) - 0.5
    for eps in _CONSTANTS if own is None else (own,):
        x = (numbers * eps**0.5).to(like.device, like.dtype)  # small numbers, so that eps counts
        expected = type(module).forward(module, x)
        for form in (ONCE, CENTERED):
            norm = UnweightedNorm(module, eps, form, like)
            if _is_right(form, norm.by_torch(x), expected):
                return norm
    return Called(module)


def has_parameters(module: nn.Module) -> bool:
    """Return whether a module has parameters of its own."""
    return any(parameter is not None for parameter in module._parameters.values())


def _eps_of(module: nn.Module) -> float | None:
    return next((getattr(module, name) for name in _EPS if isinstance(getattr(module, name, None), float)), None)


def written_norm(module: nn.Module) -> Map:
    """Return a norm in as few calls as compute the same; a norm of an unknown kind is called as it is."""
    weight = module._parameters.get("weight")
    if type(module) is nn.LayerNorm and weight is not None and weight.dim() == 1:
        return Norm(module, module.eps, CENTERED)
    eps, own = _eps_of(module), {name for name, parameter in module.named_parameters()}
    if eps is None or weight is None or weight.dim() != 1 or not own <= {"weight", "bias"}:
        return Called(module)
    key = type(module), type(module).forward, eps, weight.dtype, weight.device.type, len(weight), len(own)
    if key not in _norms:
        _norms[key] = _form_of(module, eps)
    form = _norms[key]
    return Called(module) if form is None else Norm(module, eps, form)


@torch.no_grad()
def _form_of(module: nn.Module, eps: float) -> int | None:
    """Return the form of a norm, found by trying it with other weights; None if it is of no known form."""
    weight: Any = module._parameters["weight"]
    numbers = torch.rand(5, len(weight), generator=torch.Generator().manual_seed(0)) + 0.5
    numbers = numbers.to(weight.device, weight.dtype)
    probe, has_bias = copy.copy(module), module._parameters.get("bias") is not None
    pairs = {"weight": numbers[0], "bias": numbers[1] if has_bias else None}
    probe._parameters = {
        name: None if (item := pairs.get(name)) is None else nn.Parameter(item, requires_grad=False)
        for name in module._parameters
    }
    x = (numbers[2:] - 1) * eps**0.5  # small numbers, so that eps counts
    expected = type(module).forward(probe, x)  # without hooks, which are not the norm's
    forms = (*(() if has_bias else (PLAIN, ONCE, SHIFTED)), CENTERED, CENTERED_SHIFTED)
    found = {form: Norm(probe, eps, form).by_torch(x) for form in forms}
    return next((form for form in found if _is_right(form, found[form], expected)), None)


def _is_right(form: int, found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether numbers are equal; for layer norms, of which models' own sum up in another order, nearly so."""
    bound = 2 * torch.finfo(expected.dtype).eps if form >= CENTERED else 0.0
    return torch.allclose(found, expected, rtol=bound, atol=bound)
