"""How a draft model's vocabulary stands to its target's, where they are not the same."""

from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad


class SharedVocabulary(NamedTuple):
    """
    One tokenizer, with embeddings of different sizes: ids below both sizes mean the same, and what one model has beyond
    is padding, or was added to it later. Such tokens are never proposed, and a draft reads the text without those that
    it does not know.

    Args:
        draft_size, target_size (`int`): Of the vocabularies, padding included.
    """

    draft_size: int
    target_size: int

    def known(self, tokens: np.ndarray) -> list[int]:
        """Those of a text's tokens that the draft knows."""
        return tokens[tokens < self.draft_size].tolist()

    def scores(self, logits: torch.Tensor, is_whole: bool = False) -> torch.Tensor:
        """
        The target's part of logits `[nodes, draft_size]`: of those tokens that both have, or where it is to be
        `is_whole`, of all `target_size`, of which the draft's are the first.
        """
        missing = self.target_size - self.draft_size if is_whole else 0
        return logits[:, : self.target_size] if missing <= 0 else pad(logits, (0, missing), value=-torch.inf)
