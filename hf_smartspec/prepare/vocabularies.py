"""Whether a draft model's token ids mean what its target's do, where the two have vocabularies of different sizes."""

from transformers import AutoTokenizer, PreTrainedModel

from ..candidates.vocabulary import SharedVocabulary
from ..log import get_logger
from .model_state import state_of

logger = get_logger(__name__)

_PADDING = 0.01  # of the larger vocabulary: Qwen2.5's sizes differ by 0.1 %, Pythia's by 0.8 %
_ALIKE = 0.99  # of the smaller tokenizer's ids: some were reserved, and named later


def shared_vocabulary(draft: PreTrainedModel, target: PreTrainedModel) -> SharedVocabulary | None:
    """
    The ids that a draft model shares with its target, where one of the two has more; None where they have as many, and
    are taken to have one tokenizer.

    Sizes that differ tell little: of one tokenizer, embeddings are padded to different multiples, or have grown by some
    tokens. So tokenizers are compared that lie beside the models, on this machine; where there are none, vocabularies
    that differ by no more than one percent are taken to be one.

    Raises:
        ValueError: if the ids of one mean nothing to the other.
    """
    sizes = SharedVocabulary(_size(draft), _size(target))
    if sizes.draft_size == sizes.target_size:
        return None
    difference = state_of(target).vocabulary_of(draft, sizes, lambda: _difference(draft, target, sizes))
    if difference is not None:
        raise ValueError(
            f"The draft model has a vocabulary of {sizes.draft_size} tokens and the target one of {sizes.target_size}, "
            f"{difference}: draft and target must have one tokenizer. Use another draft, or "
            "`assistant='prompt_lookup'`, which needs none."
        )
    return sizes


def _size(model: PreTrainedModel) -> int:
    return model.config.get_text_config(decoder=True).vocab_size


def _difference(draft: PreTrainedModel, target: PreTrainedModel, sizes: SharedVocabulary) -> str | None:
    """Why the ids of two vocabularies of different sizes mean different tokens; None if they mean the same."""
    vocabularies = [_vocabulary(model) for model in (draft, target)]
    if all(vocabularies):
        return None if _share_ids(*vocabularies) else "and the tokenizers beside them differ"
    if max(sizes) - min(sizes) <= _PADDING * max(sizes):
        logger.info(f"Vocabularies of {sizes.draft_size} and {sizes.target_size} tokens are taken to be one, padded.")
        return None
    return (
        f"which is more than padding (at most {_PADDING:.0%}), and beside one of them lies no tokenizer that would say "
        "that ids mean the same"
    )


def _vocabulary(model: PreTrainedModel) -> dict[str, int]:
    """Tokens with their ids; none where the model's tokenizer is not on this machine."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(model.name_or_path, local_files_only=True, trust_remote_code=False)
        vocabulary = tokenizer.get_vocab()
    except Exception:  # of many kinds: no such folder, no tokenizer in it, one that needs code of its own
        return {}
    # Where there are no files, an empty one may be made up from the model's type.
    return vocabulary if 2 * len(vocabulary) > _size(model) else {}


def _share_ids(first: dict[str, int], second: dict[str, int]) -> bool:
    """Whether the tokens of the smaller vocabulary have the same ids in the larger one."""
    small, large = sorted((first, second), key=len)
    return sum(large.get(token) == number for token, number in small.items()) >= _ALIKE * len(small)
