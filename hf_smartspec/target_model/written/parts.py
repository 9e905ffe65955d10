"""Parts of a written-out layer: modules that are called, and linear layers side by side."""

import weakref
from collections.abc import Callable, Sequence
from itertools import chain
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ...cpu.few_tokens import has_kernels, product
from ...cpu.kernels.dots import SIDE
from ...cpu.quantized import Int4Linear, Int8Linear, QuantizedLinear
from ...cpu.quantized.product import quantized_linear
from ...cpu.tensor_checks import has_sums_of_bits, sums_of_bits, version_of
from ..cache.free_memory import free_bytes

Map = Callable[[torch.Tensor], torch.Tensor]  # [N, in] -> [N, out]

_LINEAR = nn.Linear, Int8Linear, Int4Linear
_MOST_MEMORY = 0.5  # of the free memory that copies take


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


class Positions(Weighted):
    """
    Learnt embeddings of positions.

    Args:
        module (`nn.Embedding`): Their weight. OPT's has an `offset`, from which positions are counted.
    """

    def __init__(self, module: nn.Embedding):
        super().__init__(module)
        self.offset: int = getattr(module, "offset", 0)
        self.num = module.num_embeddings - self.offset

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        return torch.embedding(self._parameters()["weight"], positions + self.offset)


class Fused:
    """
    Linear layers of the same input, side by side: one product in place of several, where their weights are neighbouring
    rows of one tensor.

    Args:
        modules (sequence of `nn.Linear` or of `QuantizedLinear`): Layers of one kind, in the order of their outputs.
    """

    def __init__(self, modules: Sequence[nn.Linear | QuantizedLinear]):
        # No tensor is kept, so that the model's old memory is freed when it is moved.
        self._modules = [weakref.ref(module) for module in modules]
        lengths = [(name, len(item)) for module in modules for name, item in module.named_parameters(recurse=False)]
        self._lengths = {name: sum(num for other, num in lengths if other == name) for name, _ in lengths}
        # Blocks of quantized weights are filled up with zeros, which would stand between the outputs of two layers.
        has_blocks = isinstance(modules[0], QuantizedLinear)
        num_outputs = sum(module.out_features for module in modules) if has_blocks else self._lengths["weight"]
        self.shape = num_outputs, modules[0].in_features
        self._can_be_one = not has_blocks or not any(module.out_features % SIDE for module in modules[:-1])
        self._is_one = self._can_be_one and all(map(_are_side_by_side, self._parameters()))

    def lay_out(self) -> None:
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
        return product(x, weight, bias) if scale is None else quantized_linear(x, weight, scale, bias, num_outputs)


class Transposed(Weighted):
    """
    A linear layer whose weight is `[in, out]` (GPT-2), which is transposed in a copy where there is memory for it. The
    weight itself stays as it is: optimizers, savers and others expect it where it was, and contiguous.

    Args:
        module (`Conv1D`): The layer.
    """

    def __init__(self, module: nn.Module):
        super().__init__(module)
        self.shape = tuple(reversed(module.weight.shape))  # type: ignore[arg-type]
        self._copy: torch.Tensor | None = None
        self._version, self._sums = 0, torch.empty(0)  # of the weight when it was copied
        self._lock = Lock()  # held while the copy is compared and filled

    def num_bytes(self) -> int:
        """Return the bytes of a copy; 0 where products read the weight as quickly as it is."""
        weight = self._parameters()["weight"]
        return weight.numel() * weight.itemsize if weight.is_cpu and has_kernels(weight.dtype) else 0

    def lay_out(self) -> None:
        """Make the copy, where it is of use."""
        if self.num_bytes():
            weight = self._parameters()["weight"]
            with torch.inference_mode(False), torch.no_grad():
                self._copy = weight.new_empty(self.shape)
            self._fill(self._copy, weight, version_of(weight), _sums_of(weight))

    def look(self, thoroughly: bool) -> None:
        """Make the copy anew, in place, if the weight has changed: by torch's count or, thoroughly, in any way."""
        if (copy := self._copy) is None:
            return
        with self._lock:
            weight = self._parameters()["weight"]
            version = version_of(weight)
            if version == self._version and not thoroughly:
                return
            sums = _sums_of(weight)
            if version != self._version or not torch.equal(self._sums, sums):
                self._fill(copy, weight, version, sums)

    def _fill(self, copy: torch.Tensor, weight: torch.Tensor, version: int, sums: torch.Tensor) -> None:
        """Fill the copy. What the weight was is taken before, since another thread may change it meanwhile."""
        with torch.no_grad():
            copy.copy_(weight.detach().t())
        self._version, self._sums = version, sums

    def weights(self) -> list[torch.Tensor]:
        return [self._parameters()["weight"]]

    def whole(self) -> "Weights":
        parameters = self._parameters()
        return Weights(parameters["weight"].t() if self._copy is None else self._copy, parameters["bias"])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias, _ = self.whole()
        return product(x, weight, bias)


def lay_out(maps: Sequence[Fused | Transposed]) -> None:
    """Lay out the weights of maps in memory, without copies where these would take too much of it."""
    copied = [item for item in maps if isinstance(item, Transposed)]
    has_room = sum(item.num_bytes() for item in copied) <= _MOST_MEMORY * free_bytes(torch.device("cpu"))
    for item in maps:
        if has_room or isinstance(item, Fused):
            item.lay_out()


def _sums_of(weight: torch.Tensor) -> torch.Tensor:
    """Return sums that show changes of a weight; NaN, which equals nothing, where its bits cannot be added up."""
    return sums_of_bits(weight) if has_sums_of_bits(weight) else torch.tensor(torch.nan)


class Rows(Weighted):
    """A linear layer of a module that has a weight `[out, in]`, perhaps a bias, and computes more (routers)."""

    def __init__(self, module: nn.Module):
        super().__init__(module)
        self.shape = tuple(module.weight.shape)  # type: ignore[arg-type]

    def weights(self) -> list[torch.Tensor]:
        return [self._parameters()["weight"]]

    def whole(self) -> "Weights":
        parameters = self._parameters()
        return Weights(parameters["weight"], parameters.get("bias"))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias, _ = self.whole()
        return product(x, weight, bias)


class Sinks(Weighted):
    """Logits that join the scores of each head in the softmax of attention, and have no value (GPT-OSS)."""

    def numbers(self) -> torch.Tensor:
        """Return them, `[heads]`."""
        found: torch.Tensor = self._parameters()["sinks"]
        return found


class Weights(NamedTuple):
    """Parameters of a linear layer; `scale` is None unless it is quantized."""

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
    return type(module) in (*_LINEAR, Conv1D)


def can_fuse(modules: Sequence[nn.Module]) -> bool:
    """Return whether these are plain linear layers of one kind."""
    if type(modules[0]) not in _LINEAR or len({type(module) for module in modules}) > 1:
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
        return Transposed(modules[0]) if type(modules[0]) is Conv1D else Called(modules[0])
    return Beside([written_map([module]) for module in modules])


class Beside:
    """Maps of the same input, of any kinds, with their outputs side by side."""

    def __init__(self, maps: Sequence[Map]):
        self.maps = maps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([item(x) for item in self.maps], dim=-1)
