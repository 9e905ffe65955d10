"""Copies of drafters in float32 that are trained, while the originals draft."""

import copy
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from ..candidates.base import TreeCandidateGenerator
from ..candidates.committed import LAST
from ..candidates.forwarding import unwrapped
from ..candidates.heads.eagle.heads import EagleHeads
from ..candidates.heads.medusa.heads import MedusaHeads
from ..candidates.models.draft_model import DraftModelCandidates
from ..candidates.models.encoded import reads_encoder
from ..candidates.models.translated.source import TranslatedDraftCandidates
from ..training.draft import logits_after
from ..training.eagle import EagleDrafts
from ..training.medusa import learnt
from ..training.texts import IGNORED
from .branches import logits_with_branches, reads_branches
from .drafted import Layout
from .samples import Batch

_DECAY = 0.8  # of the weight of each further token of a draft in the loss: Medusa's Eq. 1, EAGLE-3's section 3.2


class Predictions(NamedTuple):
    """
    A drafter's predictions of some tokens.

    Args:
        logits (`torch.Tensor` of shape `[n, own vocab]`): The drafter's logits.
        where (`torch.Tensor` of shape `[rows, length]`, bool): The n predicted tokens, in order.
        weight (`float`): Weight in the loss.
    """

    logits: torch.Tensor
    where: torch.Tensor
    weight: float = 1.0


class Student(ABC):
    """
    A drafter and its copy that is trained.

    Args:
        module (`nn.Module`): The module that drafts. It does not change until `publish`.

    Attributes:
        hidden_layers (tuple of `int`): Layers of the target whose hidden states the drafter reads.
        own_ids (`torch.Tensor` of shape `[own vocab]`, *optional*): The target's token of each output, ascending, where
            the drafter has fewer tokens.
    """

    hidden_layers: tuple[int, ...] = ()
    own_ids: torch.Tensor | None = None

    @torch.inference_mode(False)  # tensors made in inference mode cannot be trained
    def __init__(self, module: nn.Module, shared: Sequence[Any] = ()):
        self._module = weakref.ref(module)  # a drafter that is not used any more is freed
        self.copy = copy.deepcopy(module, {id(item): item for item in shared})
        learns = {name for name, _ in self.learnt(module)}
        for name, parameter in self.copy.named_parameters():
            if name in learns:
                parameter.data = parameter.data.float()
                parameter.requires_grad_(True)
        self.parameters = [(name, item) for name, item in self.copy.named_parameters() if name in learns]

    @abstractmethod
    def predictions(self, batch: Batch) -> Iterator[Predictions]:
        """Yield, for every token of a draft, its predictions after each token of the batch."""

    @classmethod  # noqa: B027 - most kinds can learn
    def check(cls, module: nn.Module) -> None:
        """Raise `ValueError` if the module is of a kind that cannot learn."""

    @classmethod
    def learnt(cls, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the names and parameters that are trained."""
        yield from module.named_parameters()

    @property
    def device(self) -> torch.device:
        return self.parameters[0][1].device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights that draft."""
        return next(iter(self._live().values())).dtype

    @property
    def module(self) -> nn.Module | None:
        """The module that drafts; None once it has been freed."""
        return self._module()

    def _live(self) -> dict[str, nn.Parameter]:
        module = self.module
        assert module is not None, "callers hold the module"
        return dict(self.learnt(module))

    def weights(self) -> list[torch.Tensor]:
        """Return a copy of the trained weights, float32."""
        return [item.detach().clone() for _, item in self.parameters]

    def live_weights(self) -> list[torch.Tensor]:
        """Return a copy of the weights that draft, float32."""
        live = self._live()
        return [live[name].detach().float().clone() for name, _ in self.parameters]

    @torch.no_grad()
    def take(self, weights: Sequence[torch.Tensor]) -> None:
        """Continue training from these weights."""
        for (_, item), weight in zip(self.parameters, weights):
            item.copy_(weight)

    @torch.inference_mode()  # the module's tensors may have been made in inference mode
    def publish(self, weights: Sequence[torch.Tensor]) -> None:
        """Copy these weights into the module that drafts."""
        live = self._live()
        for (name, _), weight in zip(self.parameters, weights):
            live[name].copy_(weight)

    def own(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the drafter's ids of the target's tokens, of the same shape; -1 for tokens that it lacks."""
        if self.own_ids is None:
            return ids
        place = torch.searchsorted(self.own_ids, ids).clamp(max=len(self.own_ids) - 1)
        return torch.where(self.own_ids[place] == ids, place, -1)


class DraftStudent(Student):
    """A draft model, or only its adapters (PEFT), if it has any."""

    def __init__(self, module: nn.Module):
        super().__init__(module)
        self.copy.eval()  # without dropout: acceptance rates are compared

    @classmethod
    def check(cls, module: nn.Module) -> None:
        model = cast(PreTrainedModel, module)
        reads_tokens = model.config.is_encoder_decoder and model.main_input_name == "input_ids"
        if reads_encoder(model) and not reads_tokens:  # samples hold no sounds
            raise ValueError(f"{type(module).__name__} hears, or reads the target's encoder outputs, and cannot learn.")

    @classmethod
    def learnt(cls, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        has_adapters = _has_adapters(module)
        yield from (item for item in module.named_parameters() if not has_adapters or "lora_" in item[0])

    def predictions(self, batch: Batch) -> Iterator[Predictions]:
        model: Any = self.copy
        where = batch.is_learnt.clone()
        where[:, 0] = False
        if model.config.is_encoder_decoder:
            read = {"input_ids": batch.encoded, "attention_mask": batch.is_encoded}
            logits = model(**read, decoder_input_ids=batch.ids, use_cache=False).logits
            yield Predictions(logits[:, :-1][where[:, 1:]], where)
            return
        if batch.layout is not None:
            yield from self._with_drafts(batch.ids, where, batch.layout)
            return
        yield Predictions(logits_after(model, batch.ids, where[:, 1:]), where)

    def _with_drafts(self, ids: torch.Tensor, where: torch.Tensor, layout: Layout) -> Iterator[Predictions]:
        where = where | layout.is_drafted
        if not bool(where.any()):
            return
        rows, columns = where.nonzero(as_tuple=True)
        # Logits are after a drafted token, and before a text's token.
        columns = torch.where(layout.is_drafted[where], columns, columns - 1)
        first = int(columns.min())
        yield Predictions(logits_with_branches(self.copy, ids, layout, first)[rows, columns - first], where)

    def own(self, ids: torch.Tensor) -> torch.Tensor:
        model: Any = self.copy
        return torch.where(ids < model.get_output_embeddings().weight.shape[0], ids, -1)


class MedusaStudent(Student):
    """Medusa heads. The target's output layer, which they may share, is not trained."""

    hidden_layers = (LAST,)

    def __init__(self, heads: MedusaHeads):
        super().__init__(heads, list(heads.outputs))
        ids: Any = heads.ids
        self.own_ids = ids

    @classmethod
    def check(cls, module: nn.Module) -> None:
        ids: Any = module.ids
        if ids is not None and not bool((ids[1:] > ids[:-1]).all()):
            raise ValueError("Medusa heads whose `token_map` is not ascending cannot learn.")

    @classmethod
    def learnt(cls, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        yield from (item for item in module.named_parameters() if item[0].startswith("blocks."))

    def predictions(self, batch: Batch) -> Iterator[Predictions]:
        heads: Any = self.copy
        states = batch.hidden[LAST].float()
        labels = torch.where(batch.is_response, batch.ids, IGNORED)
        for head, is_asked in enumerate(learnt(labels, heads.num_heads)):
            ahead = head + 2
            where = torch.zeros_like(batch.is_learnt)
            where[:, ahead:] = is_asked & batch.is_learnt[:, ahead:]
            yield Predictions(
                heads.logits_of(head, states[:, : where.shape[1] - ahead][where[:, ahead:]]), where, _DECAY**head
            )


class EagleStudent(Student):
    """Heads of EAGLE-3, which draft further tokens from their own features."""

    def __init__(self, heads: EagleHeads, num_steps: int = 3):
        super().__init__(heads, heads._target_parts)
        self.hidden_layers, self.own_ids = heads.hidden_layers, heads.token_ids
        self._drafts = EagleDrafts(cast(EagleHeads, self.copy), num_steps)

    @classmethod
    def check(cls, module: nn.Module) -> None:
        heads = cast(EagleHeads, module)
        if not heads.is_third or heads.mask_hidden is not None:
            raise ValueError("Heads of EAGLE-1 and 2, and of P-EAGLE, cannot learn while they serve: use EAGLE-3's.")

    @classmethod
    def learnt(cls, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        yield from (item for item in module.named_parameters() if item[0].startswith("parts."))

    def predictions(self, batch: Batch) -> Iterator[Predictions]:
        states = torch.cat([batch.hidden[layer] for layer in self.hidden_layers], dim=-1).float()
        labels = torch.where(batch.is_response, batch.ids, IGNORED)
        for step, (logits, asked) in enumerate(self._drafts(batch.ids, labels, states)):
            ahead = step + 1
            where = torch.zeros_like(batch.is_learnt)
            where[:, ahead + 1 :] = asked[:, :-1]
            chosen = batch.is_learnt[where]
            yield Predictions(logits[chosen], where & batch.is_learnt, _DECAY**step)


def student_of(module: nn.Module) -> Student:
    """Return a student of a drafter."""
    kind: Callable[[Any], Student] = _kind_of(module)
    return kind(module)


def _kind_of(module: nn.Module) -> type["DraftStudent | MedusaStudent | EagleStudent"]:
    if isinstance(module, MedusaHeads):
        return MedusaStudent
    return EagleStudent if isinstance(module, EagleHeads) else DraftStudent


def check_student(module: nn.Module, target: nn.Module) -> None:
    """Raise `ValueError` if a drafter cannot learn, or shares trained parameters with the target."""
    kind, name = _kind_of(module), type(module).__name__
    kind.check(module)
    if getattr(module, "hf_quantizer", None) is not None and not _has_adapters(module):
        raise ValueError(f"`online` is given, and {name} is quantized: train it before that, or give it adapters.")
    storages = {_address(item) for item in target.parameters() if not item.is_meta}
    for parameter_name, parameter in kind.learnt(module):
        if parameter.is_meta or not parameter.is_floating_point():
            kept = "is offloaded" if parameter.is_meta else f"holds {parameter.dtype}"
            raise ValueError(f"`online` is given, and `{parameter_name}` of {name} {kept}, which cannot learn.")
        if _address(parameter) in storages:
            raise ValueError(
                f"`online` is given, and `{parameter_name}` of {name} is the target's own, which must not change: "
                "give the drafter weights of its own, or adapters."
            )


def check_drafts(module: nn.Module, sampling: str, max_length: int) -> None:
    """Raise `ValueError` if a drafter cannot learn from rejected drafts."""
    model: Any = module
    is_decoder = _kind_of(module) is DraftStudent and not model.config.is_encoder_decoder
    if not is_decoder or not reads_branches(module, max_length):
        raise ValueError(
            f"`sampling={sampling!r}` is for draft models whose attention follows a mask of any kind, and that of "
            f"{type(module).__name__} does not: use `sampling='teacher'`."
        )


def _has_adapters(module: nn.Module) -> bool:
    return any("lora_" in name for name, _ in module.named_parameters())


def _address(tensor: torch.Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


def module_of(source: TreeCandidateGenerator) -> nn.Module | None:
    """Return the module of a source that drafts and can learn; None if there is none."""
    source = unwrapped(source)
    if isinstance(source, DraftModelCandidates):
        return None if isinstance(source, TranslatedDraftCandidates) else source.model
    heads = getattr(source, "heads", None)
    return heads if isinstance(heads, MedusaHeads | EagleHeads) else None
