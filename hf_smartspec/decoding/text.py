"""The text of a request: its prompt, what was generated, and the draft under verification."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ..drafts.tree import DraftTree


@dataclass(eq=False)
class RequestText:
    """
    One row of a `generate` call: its tokens, the noise that it is sampled with, and the draft under verification.

    Args:
        request_id (`Hashable`): Name of the request, for candidate sources.
        index (`int`): Row in the caller's batch.
        padded_prompt (`torch.LongTensor` of shape `[length]`): The row as the caller passed it.
        mask (`torch.BoolTensor` of shape `[length]`): False where the row is padding.
        max_new_tokens (`int`, *optional*): Tokens after which plain decoding stops.
        seed (`int`, *optional*): Seed of the row's noise; None for greedy rows.
        tag (`str`, *optional*): Kind of text, for sources that draft by it.
    """

    request_id: Hashable
    index: int
    padded_prompt: torch.Tensor
    mask: torch.Tensor
    max_new_tokens: int | None = None
    seed: int | None = None
    tag: str | None = None

    tokens: list[int] = field(default_factory=list)  # generated
    stopped_at: int | None = None  # number of generated tokens at which plain decoding stops the row

    # The draft under verification: the target's tokens after the last committed one and after each node, where they
    # were picked, the node that the target's path has reached, and the path.
    tree: DraftTree | None = None
    picks: list[int] = field(default_factory=list)
    cursor: int = -1
    path: list[int] = field(default_factory=list)

    scores: list[torch.Tensor] = field(default_factory=list)  # processed, [vocab_size] float32 for every token
    raw_logits: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt: np.ndarray = self.padded_prompt[self.mask].numpy()  # int64 [prompt_len]
        self._start = len(self.padded_prompt)  # of generated tokens, in the padded text
        self._padded = np.empty(self._start + min(self.max_new_tokens or 256, 4096) + 1, np.int64)
        self._padded[: self._start] = self.padded_prompt

    @property
    def num_generated(self) -> int:
        return len(self.tokens)

    @property
    def num_valid(self) -> int:
        """Number of generated tokens up to the row's end."""
        return self.num_generated if self.stopped_at is None else self.stopped_at

    @property
    def length(self) -> int:
        """Number of tokens of the text so far, without padding."""
        return len(self.prompt) + len(self.tokens)

    def ends_of(self, tree: DraftTree) -> tuple[np.ndarray, np.ndarray]:
        """
        Return the last two tokens (-1 for a missing one) of the text, and of the text continued to each of a draft's n
        nodes: two arrays `[1 + n]`, the second to last tokens and the last ones.
        """
        before, last = [-1, *self.prompt[-2:].tolist(), *self.tokens[-2:]][-2:]
        tokens = np.append(last, tree.tokens)
        return np.append(before, tokens[tree.parents + 1]), tokens

    @property
    def num_remaining(self) -> int | None:
        """Number of tokens until the length limit; None if there is none."""
        return None if self.max_new_tokens is None else self.max_new_tokens - len(self.tokens)

    @property
    def is_verifying(self) -> bool:
        return self.tree is not None

    def append(self, token: int) -> None:
        end = self._start + len(self.tokens)
        if end == len(self._padded):
            self._padded = np.concatenate([self._padded, np.empty_like(self._padded)])
        self._padded[end] = token
        self.tokens.append(token)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append several tokens."""
        if len(tokens) == 1:
            return self.append(tokens[0])
        start = self._start + len(self.tokens)
        while start + len(tokens) > len(self._padded):
            self._padded = np.concatenate([self._padded, np.empty_like(self._padded)])
        self._padded[start : start + len(tokens)] = tokens
        self.tokens.extend(tokens)

    def padded_ids(self, num_generated: int | None = None) -> torch.Tensor:
        """Return the padded prompt and the generated tokens (all, or the first `num_generated`), `[t]`."""
        length = len(self.tokens) if num_generated is None else num_generated
        return torch.from_numpy(self._padded[: self._start + length])

    def generated(self, first: int, end: int | None = None) -> np.ndarray:
        """Return generated tokens, int64: a view, which later tokens do not change."""
        return self._padded[self._start + first : self._start + (len(self.tokens) if end is None else end)]

    def text(self) -> np.ndarray:
        """Return prompt and generated tokens, without padding, int64 `[length]`."""
        return np.concatenate([self.prompt, self.generated(0)])

    def columns(self, total_length: int) -> torch.Tensor:
        """Return the columns of the row's tokens among the first `total_length` columns of the padded batch."""
        generated = torch.arange(len(self.padded_prompt), max(total_length, len(self.padded_prompt)))
        return torch.cat([self.mask.nonzero().squeeze(1), generated])

    def truncate(self, num_generated: int) -> None:
        """Drop all but the first `num_generated` generated tokens."""
        for record in (self.tokens, self.scores, self.raw_logits):
            del record[num_generated:]
