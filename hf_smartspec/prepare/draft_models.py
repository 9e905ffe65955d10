"""Draft models: load one, check that it can draft for a target, and compare its vocabulary with the target's."""

import os
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..candidates.heads.files import FLOATS, check_finite
from ..candidates.heads.kinds import load
from ..candidates.heads.learned import LearnedDrafter
from ..candidates.models.draft_model import SharedVocabulary
from ..candidates.models.encoded import reads_encoder
from ..candidates.models.translated.translation import Translation
from ..log import get_logger
from ..target_model.compat import is_stateful
from ..target_model.encoded import encoder_size
from ..target_model.model_state import state_of
from ..target_model.support.capabilities import can_pack, packing_obstacle, rowwise_obstacle

logger = get_logger(__name__)

_PADDING = 0.01  # of the larger vocabulary: Qwen2.5's sizes differ by 0.1 %, Pythia's by 0.8 %
_ALIKE = 0.99  # of the smaller tokenizer's ids: some were reserved, and named later


Drafter = PreTrainedModel | LearnedDrafter


class Tokenizers(NamedTuple):
    """The target's and the draft model's tokenizers, where the caller has given them."""

    target: PreTrainedTokenizerBase | None = None
    draft: PreTrainedTokenizerBase | None = None


def load_drafter(name: str, target: PreTrainedModel) -> Drafter:
    """
    Return a draft model, or a learned drafter of the target, by its folder or hub id. It is loaded once, and again if
    the target's dtype or device changes.

    Raises:
        ValueError: if it cannot be loaded.
    """
    state = state_of(target)
    with state.loading:
        found: Drafter | None = state.drafters.get(name)
        if found is None or (found.dtype, found.device) != (target.dtype, _device_of(found, target)):
            state.drafters[name] = found = _load(name, target)
        return found


def _device_of(drafter: Drafter, target: PreTrainedModel) -> torch.device:
    """Return the drafter's device: of the target's head, which may differ from its first layers', if it is learned."""
    output: Any = target.get_output_embeddings() if isinstance(drafter, LearnedDrafter) else None
    return target.device if output is None else output.weight.device


def _load(name: str, target: PreTrainedModel) -> Drafter:
    if (learned := load(name, target)) is not None:
        return learned
    try:
        draft: Any = load_whole(_class_of(name, target), name, dtype=target.dtype)
    except Exception as error:  # many kinds: no such repository, no network, no weights, unreadable ones
        found = "is a folder, but holds" if os.path.isdir(name) else "is neither a preset nor a folder that exists, and"
        raise ValueError(f"`assistant={name!r}` {found} no draft model that can be loaded: {error}") from error
    return draft.to(target.device).eval()


def load_whole(kind: Any, name: str, **options: Any) -> PreTrainedModel:
    """
    Return `kind.from_pretrained(name, **options)`, a draft model, after a check of its weights. transformers
    initializes missing weights at random and loads NaN: hardly any draft of such a model is accepted.

    Raises:
        ValueError: if weights are missing that are not tied to others, or if one is NaN or infinite. Quantized weights
            and weights on the meta device are not checked.
    """
    draft, info = kind.from_pretrained(name, output_loading_info=True, **options)
    missing = sorted(info["missing_keys"])
    if missing:
        more = f" and {len(missing) - 3} others" if len(missing) > 3 else ""
        raise ValueError(
            f"its files lack weights of {type(draft).__name__}, which would be random: {', '.join(missing[:3])}{more}"
        )
    model: PreTrainedModel = draft
    for key, parameter in model.named_parameters():
        if type(parameter) is nn.Parameter and parameter.dtype in FLOATS and not parameter.is_meta:
            check_finite(key, parameter.detach())
    return model


def _class_of(name: str, target: PreTrainedModel) -> Any:
    """Return the auto class that loads a draft model, with an encoder if both the draft and the target have one."""
    if not target.config.is_encoder_decoder or not AutoConfig.from_pretrained(name).is_encoder_decoder:
        return AutoModelForCausalLM
    return AutoModelForSeq2SeqLM if target.main_input_name == "input_ids" else AutoModelForSpeechSeq2Seq


def check_draft_model(
    draft: PreTrainedModel, target: PreTrainedModel, tokenizers: Tokenizers | None = None
) -> SharedVocabulary | Translation | None:
    """
    Return how the draft model's vocabulary relates to the target's (see `vocabulary_between`).

    Raises:
        ValueError: if the model cannot draft for the target.
    """
    vocabulary = vocabulary_between(draft, target, tokenizers)
    obstacle = None
    if is_stateful(draft) and not can_pack(draft):
        obstacle = "it keeps a state that cannot be taken back"
    elif target.config.is_encoder_decoder and reads_encoder(draft):
        obstacle = _encoder_obstacle(draft, target, vocabulary)
    elif draft.config.is_encoder_decoder:
        obstacle = "it has an encoder, and the target has none whose inputs it could read"
    elif not can_pack(draft):
        obstacle = rowwise_obstacle(draft)
    if obstacle is not None:
        raise ValueError(
            f"{type(draft).__name__} cannot draft: {obstacle}. Use a draft of another architecture, or "
            "`assistant='prompt_lookup'`, which needs none."
        )
    return vocabulary


def _encoder_obstacle(
    draft: PreTrainedModel, target: PreTrainedModel, vocabulary: SharedVocabulary | Translation | None
) -> str | None:
    """Return why a draft model cannot use the inputs or outputs of the target's encoder; None if it can."""
    if isinstance(vocabulary, Translation):
        return "it reads other tokens than the target's encoder"
    if not draft.config.is_encoder_decoder:
        size, others = encoder_size(draft), encoder_size(target)
        if size != others:
            return f"it reads encoder outputs of {size} dimensions, and those of the target have {others}"
    elif draft.main_input_name != target.main_input_name:
        return f"its encoder reads `{draft.main_input_name}`, and the target's `{target.main_input_name}`"
    elif (bins := _mel_bins(draft)) != _mel_bins(target):
        return f"its encoder reads features of {bins} mel bins, and the target's of {_mel_bins(target)}"
    elif vocabulary is not None and vocabulary.draft_size < vocabulary.target_size and _mel_bins(draft) is None:
        return "its encoder does not know all tokens that the target's reads"
    return packing_obstacle(draft)


def _mel_bins(model: PreTrainedModel) -> int | None:
    return getattr(model.config, "num_mel_bins", None)


def vocabulary_between(
    draft: PreTrainedModel, target: PreTrainedModel, given: Tokenizers | None = None
) -> SharedVocabulary | Translation | None:
    """
    Return how a draft model's vocabulary relates to its target's: None if both are the same, a `SharedVocabulary` if
    one of the two has more tokens, and a `Translation` if their tokenizers differ.

    Sizes alone do not decide: models with the same tokenizer pad embeddings to different multiples, or have a few more
    tokens. So tokenizers are compared: those that are given or, where sizes differ, those stored beside the models on
    this machine. Without tokenizers, vocabularies whose sizes differ by at most one percent are taken to be the same.

    Raises:
        ValueError: if the vocabularies may differ and a tokenizer is missing.
    """
    given = Tokenizers() if given is None else given
    sizes = SharedVocabulary(_size(draft), _size(target))
    if sizes.draft_size == sizes.target_size and given.draft is None:
        return None
    state, key = state_of(target), (sizes, *given)
    with state.loading:
        if draft not in state.vocabularies or state.vocabularies[draft][0] != key:
            state.vocabularies[draft] = key, _compare(draft, target, sizes, given)
        found = state.vocabularies[draft][1]
    if isinstance(found, str):
        raise ValueError(
            f"The draft model has a vocabulary of {sizes.draft_size} tokens and the target one of {sizes.target_size}, "
            f"{found}. Pass both tokenizers, `tokenizer=` and `assistant_tokenizer=`, or use "
            "`assistant='prompt_lookup'`, which needs none."
        )
    return None if sizes.draft_size == sizes.target_size and found == sizes else found


def _size(model: PreTrainedModel) -> int:
    return model.config.get_text_config(decoder=True).vocab_size


def _compare(
    draft: PreTrainedModel, target: PreTrainedModel, sizes: SharedVocabulary, given: Tokenizers
) -> SharedVocabulary | Translation | str:
    """
    Return `sizes` if ids below both sizes mean the same tokens, else a translation; or the part of an error message
    that says which tokenizer is missing.
    """
    of_draft = _tokenizer_beside(draft) if given.draft is None else given.draft
    of_target = _tokenizer_beside(target) if given.target is None else given.target
    if of_draft is not None and of_target is not None:
        if _share_ids(of_draft.get_vocab(), of_target.get_vocab()):
            return sizes
        translation = Translation(of_target, of_draft, sizes.target_size, sizes.draft_size)
        logger.info(f"Draft and target have two tokenizers, with {translation.num_shared} tokens in common.")
        return translation
    if given.draft is not None:
        return "and the target's tokenizer is not stored beside it"
    if max(sizes) - min(sizes) <= _PADDING * max(sizes):
        logger.info(f"Vocabularies of {sizes.draft_size} and {sizes.target_size} tokens are taken to be one, padded.")
        return sizes
    return f"which is more than padding (at most {_PADDING:.0%}), and one of them has no tokenizer stored beside it"


def _tokenizer_beside(model: PreTrainedModel) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer stored beside the model on this machine, or None."""
    try:
        name = model.name_or_path
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=True, trust_remote_code=False)
    except Exception:  # many kinds: no such folder, no tokenizer in it, one that needs its own code
        return None
    # Without files, transformers may make up an empty tokenizer from the model's type.
    return tokenizer if 2 * len(tokenizer) > _size(model) else None


def _share_ids(first: dict[str, int], second: dict[str, int]) -> bool:
    """Return whether (nearly) all tokens of the smaller vocabulary have the same ids in the larger one."""
    small, large = sorted((first, second), key=len)
    return sum(large.get(token) == number for token, number in small.items()) >= _ALIKE * len(small)
