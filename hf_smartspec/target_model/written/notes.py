"""Notes of the modules that a plan bypasses and of the parameters that it uses."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..forward_code import foreign_code, unknown_mentions
from .modules import own_parameters
from .norms import has_parameters, unweighted_norm, written_norm
from .parts import Called, Fused, Map, Transposed, is_plain_map, written_map
from .plan import UnknownStructureError


class Notes:
    """Notes that are taken while parts of a model are written out."""

    def __init__(self, model: PreTrainedModel):
        self.model: Any = model
        self.config: Any = model.config.get_text_config(decoder=True)
        self.bypassed: list[nn.Module] = []
        self.known: set[int] = set()  # parameters, by id
        self.laid_out: list[Fused | Transposed] = []
        self.calls_modules = False

    def _bypass(self, *modules: nn.Module) -> None:
        self.bypassed += modules

    def _know(self, module: nn.Module) -> None:
        self.known |= {id(parameter) for parameter in module.parameters()}

    def _norm(self, module: nn.Module, like: torch.Tensor | None = None) -> Map:
        """Return a norm; one without a weight, if there is none, of vectors `like` this one, or of hidden states."""
        self._know(module)
        if has_parameters(module):
            norm = written_norm(module)
        else:
            size, options = self.config.hidden_size, {"dtype": self.model.dtype, "device": self.model.device}
            norm = unweighted_norm(module, torch.empty(size, **options) if like is None else like)
        if isinstance(norm, Called):
            self.calls_modules = True
        else:
            self._bypass(module)
        return norm

    def _map(self, modules: Sequence[nn.Module]) -> Map:
        for module in modules:
            self._know(module)
        self._bypass(*filter(is_plain_map, modules))
        self.calls_modules |= not all(map(is_plain_map, modules))
        written = written_map(modules)
        self.laid_out += [written] if isinstance(written, Fused | Transposed) else []
        return written

    def _child(self, module: nn.Module, name: str) -> nn.Module:
        child = module._modules.get(name)
        if child is None:
            raise UnknownStructureError(name)
        return child

    def _first(self, module: nn.Module, names: Sequence[str]) -> Any:
        found = self._optional(module, names)
        if found is None:
            raise UnknownStructureError(" or ".join(names))
        return found

    @staticmethod
    def _optional(module: nn.Module, names: Sequence[str]) -> Any:
        return next((found for name in names if (found := getattr(module, name, None)) is not None), None)

    def _check_forwards(self, *known: nn.Module) -> None:
        """Refuse modules whose forward has code that the plan does not reproduce."""
        foreign = foreign_code({type(module) for module in (self.model, *self.bypassed)})
        if reason := foreign or unknown_mentions({type(module) for module in known}):
            raise UnknownStructureError(reason)

    def _check_parameters(self, decoder: nn.Module, unused: Sequence[nn.Module]) -> None:
        """Refuse a decoder with parameters that the plan does not use."""
        left = {id(parameter) for parameter in decoder.parameters()} - self.known
        left -= {id(parameter) for layer in unused for parameter in layer.parameters()}
        if left or any(id(item) not in self.known for item in own_parameters([self.model, *self.bypassed])):
            raise UnknownStructureError("further parameters")
