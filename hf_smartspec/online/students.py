"""Drafters that learn: a copy of each in float32, apart from the one that drafts."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from ..candidates.base import TreeCandidateGenerator
from ..candidates.committed import LAST
from ..candidates.draft_model import DraftModelCandidates
from ..candidates.heads.eagle import EagleHeads
from ..candidates.heads.medusa import MedusaHeads
from ..candidates.translated.source import TranslatedDraftCandidates
from ..training.eagle import EagleDrafts
from ..training.medusa import learnt
from ..training.texts import IGNORED
from .samples import Batch

_DECAY = 0.8  # of the weight of each further token of a draft in the loss: Medusa's Eq. 1, EAGLE-3's section 3.2


class Predictions(NamedTuple):
    """
    What a drafter says of some tokens.

    Args:
        logits (`torch.Tensor` of shape `[n, own vocab]`).
        where (`torch.Tensor` of shape `[rows, length]`, bool): The n tokens, in order.
        weight (`float`): In the loss.
    """

    logits: torch.Tensor
    where: torch.Tensor
    weight: float = 1.0


class Student(ABC):
    """
    Args:
        module (`nn.Module`): The one that drafts. It stays as it is until `publish`.

    Attributes:
        hidden_layers (tuple of `int`): The target's hidden states that it looks at.
        own_ids (`torch.Tensor` of shape `[own vocab]`, *optional*): Ascending; the target's token that each output
            stands for, where these are fewer.
    """

    hidden_layers: tuple[int, ...] = ()
    own_ids: torch.Tensor | None = None

    def __init__(self, module: nn.Module, shared: Sequence[Any] = ()):
        self.module = module
        self.copy = copy.deepcopy(module, {id(item): item for item in shared})
        learns = {name for name, _ in self._learnt(module)}
        for name, parameter in self.copy.named_parameters():
            if name in learns:
                parameter.data = parameter.data.float()
                parameter.requires_grad_(True)
        self.parameters = [(name, item) for name, item in self.copy.named_parameters() if name in learns]
        self._live = dict(self._learnt(module))

    @abstractmethod
    def predictions(self, batch: Batch) -> Iterator[Predictions]:
        """Of every token of a draft that it would make behind each token."""

    def _learnt(self, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that are to change."""
        yield from module.named_parameters()

    @property
    def device(self) -> torch.device:
        return self.parameters[0][1].device

    @property
    def dtype(self) -> torch.dtype:
        """In which it drafts."""
        return next(iter(self._live.values())).dtype

    def weights(self) -> list[torch.Tensor]:
        """A copy of what has been learnt, float32."""
        return [item.detach().clone() for _, item in self.parameters]

    def live_weights(self) -> list[torch.Tensor]:
        """A copy of what drafts."""
        return [self._live[name].detach().float().clone() for name, _ in self.parameters]

    @torch.no_grad()
    def take(self, weights: Sequence[torch.Tensor]) -> None:
        """Goes on with these weights."""
        for (_, item), weight in zip(self.parameters, weights):
            item.copy_(weight)

    @torch.no_grad()
    def publish(self, weights: Sequence[torch.Tensor]) -> None:
        """These are what drafts from now on."""
        for (name, _), weight in zip(self.parameters, weights):
            self._live[name].copy_(weight)

    def own(self, ids: torch.Tensor) -> torch.Tensor:
        """The target's tokens as the drafter's own; -1 where it has none."""
        if self.own_ids is None:
            return ids
        place = torch.searchsorted(self.own_ids, ids).clamp(max=len(self.own_ids) - 1)
        return torch.where(self.own_ids[place] == ids, place, -1)


class DraftStudent(Student):
    """A draft model, or where it has adapters (PEFT), these alone."""

    def __init__(self, module: nn.Module):
        super().__init__(module)
        self.copy.eval()  # without dropout: acceptance rates are compared

    def _learnt(self, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        has_adapters = any("lora_" in name for name, _ in module.named_parameters())
        yield from (item for item in module.named_parameters() if not has_adapters or "lora_" in item[0])

    def predictions(self, batch: Batch) -> Iterator[Predictions]:
        model: Any = self.copy
        states = model.get_decoder()(input_ids=batch.ids, use_cache=False).last_hidden_state
        where = batch.is_learnt.clone()
        where[:, 0] = False
        yield Predictions(model.get_output_embeddings()(states[:, :-1][where[:, 1:]]), where)

    def own(self, ids: torch.Tensor) -> torch.Tensor:
        model: Any = self.copy
        return torch.where(ids < model.get_output_embeddings().weight.shape[0], ids, -1)


class MedusaStudent(Student):
    """Medusa heads. The target's output, which they may use, stays as it is."""

    hidden_layers = (LAST,)

    def __init__(self, heads: MedusaHeads):
        super().__init__(heads, list(heads.outputs))
        ids: Any = heads.ids
        if ids is not None and not bool((ids[1:] > ids[:-1]).all()):
            raise ValueError("Medusa heads whose `token_map` is not ascending cannot learn.")
        self.own_ids = ids

    def _learnt(self, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
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
    """Heads of EAGLE-3, which go on from their own features."""

    def __init__(self, heads: EagleHeads, num_steps: int = 3):
        if not heads.is_third:
            raise ValueError("Heads of EAGLE-1 and 2 cannot learn while they serve: use such of EAGLE-3.")
        super().__init__(heads, heads._target_parts)
        self.hidden_layers, self.own_ids = heads.hidden_layers, heads.token_ids
        self._drafts = EagleDrafts(cast(EagleHeads, self.copy), num_steps)

    def _learnt(self, module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
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
    """What learns of a drafter."""
    if isinstance(module, MedusaHeads):
        return MedusaStudent(module)
    return EagleStudent(module) if isinstance(module, EagleHeads) else DraftStudent(module)


def module_of(source: TreeCandidateGenerator) -> nn.Module | None:
    """What drafts in a source and can learn, if anything."""
    source = source.origin
    if isinstance(source, DraftModelCandidates):
        return None if isinstance(source, TranslatedDraftCandidates) else source.model
    heads = getattr(source, "heads", None)
    return heads if isinstance(heads, MedusaHeads | EagleHeads) else None
