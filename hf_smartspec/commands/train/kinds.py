"""What `smartspec train` can train."""

import argparse
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import nn
from transformers import PreTrainedModel

from ...candidates.heads.eagle import EagleHeads
from ...candidates.heads.medusa import MedusaHeads
from ...training.eagle import EagleTraining, frequent_tokens, new_heads
from ...training.medusa import MedusaTraining
from ...training.texts import Text


class Training(Protocol):
    """The loss of a drafter, as a module whose parameters are all that is learnt."""

    @property
    def heads(self) -> MedusaHeads | EagleHeads: ...

    def accuracy(self, texts: Sequence[Text], max_length: int, batch_size: int) -> list[dict[int, float]]: ...


def _medusa(args: argparse.Namespace, model: PreTrainedModel, texts: Sequence[Text]) -> MedusaTraining:
    return MedusaTraining(model, args.num_heads, args.num_layers)


def _eagle3(args: argparse.Namespace, model: PreTrainedModel, texts: Sequence[Text]) -> EagleTraining:
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    ids = frequent_tokens(texts, args.draft_vocab_size or vocab_size, vocab_size)
    return EagleTraining(model, new_heads(model, ids, args.neurons, args.seed), args.num_heads)


KINDS: dict[str, Callable[[argparse.Namespace, PreTrainedModel, Sequence[Text]], nn.Module]] = {
    "medusa": _medusa,
    "eagle3": _eagle3,
}
