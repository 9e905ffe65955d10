"""Encoder inputs and outputs of encoder-decoder targets, for sources that draft from them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from ..candidates import DraftModelCandidates, TreeCandidateGenerator
from ..candidates.combined.base import CombinedCandidates
from ..candidates.request import EncoderInputs
from ..target_model.encoded import encoder_size


@contextmanager
def watch_encoder(model: PreTrainedModel) -> Iterator[dict[str, Any]]:
    """
    Yield a dictionary that holds the tensors passed to the latest encoder call of this thread: `generate` runs the
    encoder but keeps only its outputs. Whisper's `generate` runs the encoder for every segment.
    """
    seen: dict[str, Any] = {}
    if not model.config.is_encoder_decoder:
        yield seen
        return
    thread = threading.get_ident()

    # An encoder that runs in another thread may find this hook half registered or half removed: without `kwargs`.
    def note(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any] | None = None) -> None:
        if threading.get_ident() == thread:
            seen.clear()
            named = (kwargs or {}) | ({model.main_input_name: args[0]} if args else {})
            seen.update((name, item) for name, item in named.items() if isinstance(item, torch.Tensor))

    handle = model.get_encoder().register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def placeholder_outputs(model: PreTrainedModel, input_ids: torch.Tensor) -> dict[str, Any]:
    """
    Return arguments of `generate` that stand in for the encoder's outputs of prompts `[batch, length]`, so that the
    encoder need not run while the call is prepared. They are one expanded zero, without memory of their own.
    """
    zero = torch.zeros((), dtype=model.dtype, device=model.device)
    return {"encoder_outputs": BaseModelOutput(zero.expand(*input_ids.shape, encoder_size(model)))}


@torch.no_grad()
def pads_outputs(model: PreTrainedModel) -> bool:
    """Return whether the encoder's outputs are padded: not one per token that it reads."""
    ids = torch.zeros(1, 3, dtype=torch.long, device=model.device)
    return model.get_encoder()(input_ids=ids, attention_mask=torch.ones_like(ids), return_dict=True)[0].shape[1] != 3


def known_arguments(model: PreTrainedModel, seen: dict[str, Any], num_rows: int) -> dict[str, Any]:
    """
    Return the encoder's inputs, if they can belong to a call of `num_rows` rows: one input per row, or one for several
    rows; else none.
    """
    main = seen.get(model.main_input_name)
    if main is None or num_rows % len(main):
        return {}
    # Whisper also passes masks of rows that have ended, and reads no masks at all.
    return {name: item for name, item in seen.items() if item.shape[:1] == main.shape[:1]}


def encoder_inputs(model_kwargs: dict[str, Any], arguments: dict[str, Any]) -> EncoderInputs | None:
    """Return the encoder's outputs, mask and inputs of a prepared call for its sources; None without an encoder."""
    outputs = model_kwargs.get("encoder_outputs")
    return None if outputs is None else EncoderInputs(outputs, model_kwargs.get("attention_mask"), arguments)


def check_encoder_arguments(source: TreeCandidateGenerator, arguments: dict[str, Any]) -> None:
    """Raise `ValueError` if a draft model has an encoder of its own and the call has no inputs for it."""
    for stage in source.stages:
        for member in stage.sources if isinstance(stage, CombinedCandidates) else ():
            check_encoder_arguments(member, arguments)
        if isinstance(stage, DraftModelCandidates) and stage.model.config.is_encoder_decoder and not arguments:
            raise ValueError(
                f"{type(stage.model).__name__} drafts by what its own encoder reads, and this call has no inputs for "
                "it: pass the encoder's inputs in place of `encoder_outputs`, to `generate` of an enabled model."
            )
