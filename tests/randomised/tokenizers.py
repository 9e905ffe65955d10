"""Tokenizers of random requests: letters that stand for the targets' tokens, and what drafts make of them."""

import random

from ..candidates.models.translated.pairs import character_tokenizer
from ..models import VOCAB_SIZE

LETTERS = "".join(map(chr, range(0x100, 0x100 + VOCAB_SIZE - 1)))  # the first token is padding
WHOLE = character_tokenizer(LETTERS)


def first_letters(size: int):
    """As many tokens of the target's; beyond these, more."""
    return character_tokenizer("".join(map(chr, range(0x100, 0x100 + size - 1))))


def _others():
    """In another order, without some, with some more."""
    letters = [*LETTERS[:-6], *"abcdefghij"]
    random.Random(0).shuffle(letters)
    return character_tokenizer("".join(letters))


def _joining():
    """Both have tokens of two letters, of which some are the same: texts may be cut otherwise as they go on."""
    rng, few = random.Random(1), LETTERS[: VOCAB_SIZE // 2]
    pairs = sorted({"".join(rng.choices(few, k=2)) for _ in range(150)})
    rng.shuffle(pairs)
    num = VOCAB_SIZE - 1 - len(few)
    return character_tokenizer(few, pairs[:num]), character_tokenizer(few[::-1], pairs[num // 2 :][: 2 * num])


PAIRS = ((WHOLE, _others()), _joining())  # of target and draft
