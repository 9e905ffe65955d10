"""Parts of a written-out layer: linear layers side by side, and rotary embeddings."""

import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from ...cpu.few_tokens import product
from ...cpu.kernels.dots import SIDE
from ...cpu.quantized import Int8Linear
from ...cpu.quantized.product import int8_linear
from ..forward_code import rotation_function

Map = Callable[[torch.Tensor], torch.Tensor]  # [N, in] -> [N, out]

_DIM = 8  # size of heads with which functions are tried out


class Called:
    """
    A module that is called as it is. Parts refer to modules weakly, so that replaced modules of a model are freed.
    """

    def __init__(self, module: nn.Module):
        self._module = weakref.ref(module)

    def __call__(self, *args: Any) -> Any:
        return self.module(*args)

    @property
    def module(self) -> Any:
        return self._module()


def module_of(part: Any) -> Any:
    """Return the module that a part calls; the part itself where it is a function or a module."""
    return part.module if isinstance(part, Called) else part


def is_bare(module: nn.Module) -> bool:
    """Return whether a call of the module runs its class's forward and nothing else."""
    own = vars(module)
    return not (own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own or "_compiled_call_impl" in own)


class Weighted:
    """Base of parts that compute with a module's parameters, which are read anew each time."""

    def __init__(self, module: nn.Module):
        self._module = weakref.ref(module)

    def _parameters(self) -> dict[str, Any]:
        module: Any = self._module()
        return module._parameters


class Fused:
    """
    Linear layers of the same input, side by side: one product in place of several, where their weights are neighbouring
    rows of one tensor.

    Args:
        modules (sequence of `nn.Linear` or of `Int8Linear`): Layers of one kind, in the order of their outputs.
    """

    def __init__(self, modules: Sequence[nn.Linear | Int8Linear]):
        # No tensor is kept, so that the model's old memory is freed when it is moved.
        self._modules = [weakref.ref(module) for module in modules]
        lengths = [(name, len(item)) for module in modules for name, item in module.named_parameters(recurse=False)]
        self._lengths = {name: sum(num for other, num in lengths if other == name) for name, _ in lengths}
        # Blocks of int8 are filled up with zeros, which would stand between the outputs of two layers.
        is_int8 = type(modules[0]) is Int8Linear
        num_outputs = sum(module.out_features for module in modules) if is_int8 else self._lengths["weight"]
        self.shape = num_outputs, modules[0].in_features
        self._can_be_one = not is_int8 or not any(module.out_features % SIDE for module in modules[:-1])
        self._is_one = self._can_be_one and all(map(_are_side_by_side, self._parameters()))

    def lay_side_by_side(self) -> None:
        """
        Make the parameters views of one tensor, so that no weights are held twice. Memory that is shared with others
        stays as it is.
        """
        parameters = self._parameters()
        if self._can_be_one and not self._is_one and all(map(_is_own, chain.from_iterable(parameters))):
            for one_kind in parameters:
                _lay_side_by_side(one_kind)
            self._is_one = True

    def _parameters(self) -> list[list[torch.Tensor]]:
        """Return the parameters of all layers by kind: weights, biases, ..."""
        entries = [list(module._parameters.values()) for item in self._modules if (module := item()) is not None]
        return [list(kind) for kind in zip(*entries) if kind[0] is not None]

    def weights(self) -> list[torch.Tensor]:
        """Return the weights of all layers, one by one."""
        return self._parameters()[0]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if (weights := self.whole()) is not None:
            return self._product(x, weights, self.shape[0])
        modules: list[Any] = [item() for item in self._modules]
        parts = [self._product(x, Weights(**module._parameters), module.out_features) for module in modules]
        return torch.cat(parts, dim=-1)

    def whole(self) -> "Weights | None":
        """Return the weights of all layers together; None where they are not neighbours."""
        if not self._is_one:
            return None
        parameters: dict[str, Any] = self._modules[0]()._parameters  # type: ignore[union-attr]
        if len(self._modules) == 1:
            return Weights(**parameters)
        firsts = {name: parameters[name] for name in self._lengths}
        return Weights(
            **{
                name: first.as_strided((self._lengths[name], *first.shape[1:]), first.stride())
                for name, first in firsts.items()
            }
        )

    @staticmethod
    def _product(x: torch.Tensor, weights: "Weights", num_outputs: int) -> torch.Tensor:
        weight, bias, scale = weights
        return product(x, weight, bias) if scale is None else int8_linear(x, weight, scale, bias, num_outputs)


class Weights(NamedTuple):
    """Parameters of a linear layer; `scale` is None unless it is in int8."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scale: torch.Tensor | None = None


def _lay_side_by_side(parameters: Sequence[torch.Tensor]) -> None:
    with torch.inference_mode(False), torch.no_grad():
        whole = torch.cat([parameter.detach() for parameter in parameters])
        for parameter, part in zip(parameters, whole.split([len(parameter) for parameter in parameters])):
            parameter.data = part


def _are_side_by_side(parameters: Sequence[torch.Tensor]) -> bool:
    """Return whether the parameters are neighbouring rows of one tensor."""
    ends = [item.data_ptr() + item.numel() * item.itemsize for item in parameters]
    follows = all(end == item.data_ptr() for end, item in zip(ends, parameters[1:]))
    storages = {item.untyped_storage().data_ptr() for item in parameters}
    return follows and len(storages) == 1 and all(item.is_contiguous() for item in parameters)


def _is_own(parameter: torch.Tensor) -> bool:
    """
    Return whether a parameter may be moved in memory: it is not part of a flat buffer, shared with other processes, or
    an inference tensor.
    """
    is_shared = parameter.device.type == "cpu" and parameter.is_shared()  # on a GPU, it is always True
    is_whole = parameter.untyped_storage().nbytes() == parameter.numel() * parameter.itemsize
    return is_whole and parameter.is_contiguous() and not is_shared and not parameter.is_inference()


def is_plain_map(module: nn.Module) -> bool:
    """Return whether the module is a linear layer that need not be called."""
    return type(module) in (nn.Linear, Int8Linear)


def can_fuse(modules: Sequence[nn.Module]) -> bool:
    """Return whether these are plain linear layers of one kind."""
    if not is_plain_map(modules[0]) or len({type(module) for module in modules}) > 1:
        return False
    weights: list[torch.Tensor] = [module.weight for module in modules]  # type: ignore[misc]
    kinds = {(weight.dtype, weight.device, module.bias is None) for weight, module in zip(weights, modules)}
    addresses = {weight.data_ptr() for weight in weights}
    return (
        all(type(weight) is nn.Parameter for weight in weights) and len(kinds) == 1 and len(addresses) == len(weights)
    )


def written_map(modules: Sequence[nn.Module]) -> Map:
    """Return the maps of one input side by side; modules other than plain linear layers are called as they are."""
    if can_fuse(modules):
        return Fused(modules)  # type: ignore[arg-type]
    if len(modules) == 1:
        return Called(modules[0])
    return Beside([written_map([module]) for module in modules])


class Beside:
    """Maps of the same input, of any kinds, with their outputs side by side."""

    def __init__(self, maps: Sequence[Map]):
        self.maps = maps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([item(x) for item in self.maps], dim=-1)


class Halves:
    """
    Rotary embeddings as most models apply them: `x * cos + rotate_half(x) * sin`, products and sum rounded as those of
    transformers, in place.
    """

    @staticmethod
    def tables(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the factors of heads, `[N, 1, dim]` each, from embeddings `[1, N, dim]`."""
        first, second = sin.chunk(2, dim=-1)
        return cos.transpose(0, 1), torch.cat([-first, second], dim=-1).transpose(0, 1)

    @staticmethod
    def rotate(x: torch.Tensor, num_heads: int, tables: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Rotate queries and keys `[N, heads + kv_heads, dim]` in place."""
        rotated = x.roll(x.shape[-1] // 2, -1).mul_(tables[1])
        x.mul_(tables[0]).add_(rotated)


class OwnRotation:
    """Rotary embeddings by the function of a model's own file (interleaved dimensions, ...)."""

    def __init__(self, function: Callable):
        self.function = function

    @staticmethod
    def tables(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return cos, sin

    def rotate(self, x: torch.Tensor, num_heads: int, tables: tuple[torch.Tensor, torch.Tensor]) -> None:
        heads = x.transpose(0, 1)[None]
        query, key = self.function(heads[:, :num_heads], heads[:, num_heads:], *tables)
        x.copy_(torch.cat([query, key], dim=1)[0].transpose(0, 1))


def written_rotation(attention: nn.Module) -> Halves | OwnRotation | None:
    """Return the rotary embeddings of an attention module; None if its file has no function for them."""
    own = rotation_function(type(attention))
    if own is None:
        return None
    return Halves() if _is_by_halves(own) else OwnRotation(own)


@lru_cache(maxsize=64)
@torch.no_grad()
def _is_by_halves(function: Callable) -> bool:
    """Return whether the function does the same as `Halves`, found by trying it."""
    generator = torch.Generator().manual_seed(0)
    angles = torch.rand(1, 3, _DIM // 2, generator=generator).repeat(1, 1, 2)  # embeddings have every angle twice
    x = torch.randn(3, 5, _DIM, generator=generator)
    results = []
    for rotation in (Halves(), OwnRotation(function)):
        results.append(x.clone())
        rotation.rotate(results[-1], 3, rotation.tables(angles.cos(), angles.sin()))
    return torch.equal(*results)
