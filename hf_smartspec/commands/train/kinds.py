"""Kinds of drafters of `smartspec train`."""

import argparse
import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from ...candidates.heads.blocks.drafter import BlockDrafter
from ...candidates.heads.blocks.files import is_block_checkpoint
from ...candidates.heads.blocks.scores import VANILLA
from ...candidates.heads.eagle.files import is_eagle_checkpoint
from ...candidates.heads.eagle.heads import EagleHeads
from ...candidates.heads.medusa.heads import is_medusa_checkpoint
from ...training.blocks import BlockTraining
from ...training.draft import DraftTraining
from ...training.eagle import EagleTraining, frequent_tokens, new_heads
from ...training.medusa import MedusaTraining
from ...training.new_blocks import new_drafter, unused_token
from ...training.texts import Text
from ..common.arguments import UsageError, usage_errors
from ..common.models import load_draft

CHECKPOINTS = "checkpoints"


class Kind(NamedTuple):
    """A kind of drafters."""

    # From arguments, target and texts to a module that returns a drafter's loss and measures its `accuracy`; all its
    # parameters are trained.
    make: Callable[[argparse.Namespace, PreTrainedModel, Sequence[Text]], nn.Module]
    save: Callable[[Any, argparse.Namespace], None]  # writes the drafter of such a module
    is_in: Callable[[str], bool]  # returns whether a folder holds such a drafter
    places: str = "after the next token"  # description of a draft's tokens, in tables, after their number


def _medusa(args: argparse.Namespace, model: PreTrainedModel, texts: Sequence[Text]) -> MedusaTraining:
    return MedusaTraining(model, args.num_heads, args.num_layers or 1)


def _eagle3(args: argparse.Namespace, model: PreTrainedModel, texts: Sequence[Text]) -> EagleTraining:
    if args.draft is not None:
        return EagleTraining(model, EagleHeads.from_pretrained(args.draft, model).float(), args.num_heads)
    heads = new_heads(model, _token_ids(args, model, texts), args.neurons, args.seed)
    return EagleTraining(model, heads, args.num_heads)


def _token_ids(args: argparse.Namespace, model: PreTrainedModel, texts: Sequence[Text]) -> torch.Tensor | None:
    """Return the tokens that a drafter may draft; None for all."""
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    return frequent_tokens(texts, args.draft_vocab_size or vocab_size, vocab_size)


def _blocks(args: argparse.Namespace, model: PreTrainedModel, texts: Sequence[Text]) -> BlockTraining:
    if args.draft is not None:
        drafter = BlockDrafter.from_pretrained(args.draft, model).float()
        if drafter.label != args.kind:
            raise UsageError(f"--draft: {args.draft!r} holds a drafter of kind {drafter.label!r}")
    else:
        drafter = new_drafter(
            model,
            unused_token(texts, model.config.get_text_config(decoder=True).vocab_size),
            args.kind,
            block_size=args.block_size,
            num_layers=args.num_layers or 5,
            neurons=args.neurons,
            token_ids=_token_ids(args, model, texts),
            markov_head=args.markov_head or VANILLA,
            seed=args.seed,
        )
    return BlockTraining(model, drafter, args.num_blocks, args.seed)


def _save_blocks(module: BlockTraining, args: argparse.Namespace) -> None:
    module.drafter.to(module.target.dtype).save_pretrained(args.output, base_model_name_or_path=args.model)


def _save_heads(module: MedusaTraining | EagleTraining, args: argparse.Namespace) -> None:
    module.heads.to(module.target.dtype).save_pretrained(args.output, base_model_name_or_path=args.model)


def _draft(args: argparse.Namespace, model: PreTrainedModel, texts: Sequence[Text]) -> DraftTraining:
    draft = shortened(model, args.num_layers or 1) if args.draft is None else load_draft(args.draft, model)
    return DraftTraining(model, draft)


def check_draft(args: argparse.Namespace, model: PreTrainedModel) -> None:
    """
    Raise `UsageError` for a draft model with another vocabulary, and for blocks without a slot that predicts or of
    another kind, before the target answers prompts.
    """
    if KINDS[args.kind].make is _blocks:
        if args.kind == "dflash" and args.block_size < 2:
            raise UsageError("--block-size must be at least 2 for DFlash, whose first slot predicts nothing")
        if args.markov_head and (args.kind != "dspark" or args.draft):
            raise UsageError("--markov-head is of a new DSpark: a drafter of --draft has one")
        if args.draft is not None and not is_block_checkpoint(args.draft):
            raise UsageError(f"--draft: {args.draft!r} holds no block drafter")
    if args.draft is None or args.kind != "draft":
        return
    with usage_errors(f"--draft: {args.draft!r} cannot be read"):
        size = AutoConfig.from_pretrained(args.draft).get_text_config(decoder=True).vocab_size
    wanted = model.config.get_text_config(decoder=True).vocab_size
    if size != wanted:
        raise UsageError(f"--draft: {args.draft!r} has a vocabulary of {size} tokens, and the target one of {wanted}")


def shortened(model: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """Return a draft model, in float32, of the target's first layers, embeddings and head."""
    config = copy.deepcopy(model.config)
    text = config.get_text_config(decoder=True)
    text.num_hidden_layers = min(num_layers, text.num_hidden_layers)
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[: text.num_hidden_layers]
    draft: Any = type(model)._from_config(config, dtype=torch.float32)
    known = draft.state_dict()
    draft.load_state_dict({name: item for name, item in model.state_dict().items() if name in known})
    moved: PreTrainedModel = draft.to(model.device)
    return moved


def _save_draft(module: DraftTraining, args: argparse.Namespace) -> None:
    draft: Any = module.draft
    draft.to(module.target.dtype).save_pretrained(args.output)
    AutoTokenizer.from_pretrained(args.model).save_pretrained(args.output)


KINDS = {
    "medusa": Kind(_medusa, _save_heads, is_medusa_checkpoint),
    "eagle3": Kind(_eagle3, _save_heads, is_eagle_checkpoint),
    "draft": Kind(_draft, _save_draft, lambda folder: (Path(folder) / CHECKPOINTS).is_dir(), "next token"),
    "dflash": Kind(_blocks, _save_blocks, is_block_checkpoint, "of the block"),
    "dspark": Kind(_blocks, _save_blocks, is_block_checkpoint, "of the block"),
}
