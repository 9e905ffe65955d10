"""Check that a draft model can draft for a target."""

from transformers import PreTrainedModel

from ..candidates.models.encoded import reads_encoder
from ..candidates.models.translated.translation import Translation
from ..candidates.models.vocabulary import SharedVocabulary
from ..target_model.compat import is_stateful
from ..target_model.support.capabilities import can_pack, rowwise_obstacle
from .vocabularies import Tokenizers, vocabulary_between


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
    if is_stateful(draft):
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
    from ..target_model.encoded import encoder_size
    from ..target_model.support.capabilities import packing_obstacle

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
