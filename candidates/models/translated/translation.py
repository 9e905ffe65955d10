"""Translation between two tokenizers: the tokens that both have, and texts of one in tokens of the other."""

import copy
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.candidate_generator import AssistantToTargetTranslator

from .text import BROKEN, Reading, TranslatedText


class _Tables(NamedTuple):
    """The shared tokens, on the device of the logits."""

    draft_ids: torch.Tensor  # [target_size] int64, of every token of the target's; 0 where the draft has none
    is_shared: torch.Tensor  # [target_size] bool
    is_known: torch.Tensor  # [draft_size] bool: which of the draft's tokens the target has
    is_readable: torch.Tensor | None  # [draft_size] bool: which of them are text; all are, where there is none


class Translation:
    """
    Translation between a target's tokenizer and a draft model's. Tokens of the same text are shared, as transformers'
    `AssistantToTargetTranslator` finds them: drafts consist of these alone (Timor et al., 2025, algorithm 4). The text
    that they continue is the target's, decoded, and encoded anew for the draft model.

    Args:
        tokenizer, assistant_tokenizer (`PreTrainedTokenizerBase`): The target's and the draft's.
        target_size, draft_size (`int`): Sizes of the models' vocabularies, padding included.

    Raises:
        ValueError: if no token is shared.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        assistant_tokenizer: PreTrainedTokenizerBase,
        target_size: int,
        draft_size: int,
    ):
        # The caller's may be padding in another thread meanwhile, which changes settings of the tokenizer.
        self.assistant_tokenizer = copy.deepcopy(assistant_tokenizer)
        self.tokenizer, self.is_own = _own(tokenizer)
        self.target_size, self.draft_size = target_size, draft_size
        # Not from transformers' cache: there, it would be taken for the one of a draft whose head was pruned.
        translator = AssistantToTargetTranslator(tokenizer, assistant_tokenizer, target_size)
        pairs = [
            (target, draft)
            for target, draft in translator.target_to_assistant_input_ids.items()
            if target < target_size and draft < draft_size
        ]
        if not pairs:
            raise ValueError("The tokenizers of draft and target have no token in common. Use another draft.")
        targets, drafts = np.array(pairs, np.int64).T
        self.num_shared = len(pairs)
        self._draft_ids = np.full(target_size, -1)
        self._draft_ids[targets] = drafts
        self._target_ids = np.zeros(draft_size, np.int64)
        self._target_ids[drafts] = targets
        self._is_known = np.zeros(draft_size, bool)
        self._is_known[drafts] = True
        self._tables: dict[torch.device, _Tables] = {}
        readable = np.isin(np.arange(draft_size), list(assistant_tokenizer.get_vocab().values()))
        self._is_readable = None if readable.all() else readable
        self._begin = _leading_tokens(assistant_tokenizer)
        self._unread = self._unreadable()

    def check_fit(self, target_size: int) -> None:
        """Raise `ValueError` if the target has a vocabulary of another size."""
        if target_size != self.target_size:
            raise ValueError(
                f"The target has a vocabulary of {target_size} tokens, and the `Translation` is for one of "
                f"{self.target_size}. Make one for this target."
            )

    def _unreadable(self) -> np.ndarray:
        """Return the target's tokens that are not text: special ones that the draft does not have, and padding."""
        known = self.assistant_tokenizer.get_vocab()
        unread = {number for text, number in special_tokens(self.tokenizer).items() if text not in known}
        if self._begin and self.tokenizer.bos_token_id is not None:
            unread.add(self.tokenizer.bos_token_id)  # the draft has its own
        unread |= set(range(max(self.tokenizer.get_vocab().values()) + 1, self.target_size))
        return np.array(sorted(unread), np.int64)

    # Drafts

    def to_target(self, tokens: np.ndarray) -> np.ndarray:
        """Return shared tokens of the draft's as the target's; others, which are never drawn, as arbitrary ones."""
        return self._target_ids[tokens]

    def shared_id(self, token: int) -> int | None:
        """Return a token of the draft's as the target's, if it has that."""
        return int(self._target_ids[token]) if self._is_known[token] else None

    def restricted(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the draft's logits `[nodes, draft_size]`, of shared tokens only."""
        return logits.masked_fill(~self._tables_on(logits.device).is_known, -torch.inf)

    def readable(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the draft's logits `[nodes, draft_size]`, without padding of its vocabulary."""
        table = self._tables_on(logits.device).is_readable
        return logits if table is None else logits.masked_fill(~table, -torch.inf)

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the draft's logits in the target's vocabulary, `[nodes, target_size]`."""
        tables = self._tables_on(logits.device)
        return logits.index_select(1, tables.draft_ids).masked_fill_(~tables.is_shared, -torch.inf)

    def draft_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return shared tokens of the target's (any shape) as the draft's, on their device."""
        return self._tables_on(tokens.device).draft_ids[tokens]

    def _tables_on(self, device: torch.device) -> _Tables:
        if device not in self._tables:
            draft_ids = torch.from_numpy(self._draft_ids)
            draft_ids, is_known = (torch.from_numpy(item).to(device) for item in (self._draft_ids, self._is_known))
            is_readable = None if self._is_readable is None else torch.from_numpy(self._is_readable).to(device)
            self._tables[device] = _Tables(draft_ids.clamp(min=0), draft_ids >= 0, is_known, is_readable)
        return self._tables[device]

    # Texts

    def begin(self, prompt: np.ndarray) -> TranslatedText:
        """Return a new text with the target's tokens of a prompt, to be read."""
        text = TranslatedText(list(self._begin), len(self._begin))
        self.extend(text, prompt)
        return text

    def extend(self, text: TranslatedText, tokens: np.ndarray) -> None:
        """Append tokens of the target's, which `read` will translate."""
        text.ids += tokens[~np.isin(tokens, self._unread)].tolist()

    def read(self, texts: Sequence[TranslatedText]) -> None:
        """Translate the tokens that were added, of all texts together."""
        strings = self.decode([text.window for text in texts])
        readings = [text.reading(string) for text, string in zip(texts, strings)]
        for text, reading, tokens in zip(texts, readings, self._encode([item.string for item in readings])):
            text.take(tokens, reading)
            if text.is_long:
                self._shorten(text, reading)

    def _shorten(self, text: TranslatedText, reading: Reading) -> None:
        """Let the window begin later, where the text after that place is encoded the same by itself."""
        starts = text.possible_starts()
        windows = self.decode([part for start in starts for part in text.around(start)])
        after = [whole[len(lead) :] for lead, whole in zip(windows[::2], windows[1::2])]
        usable = [item if reading.whole.endswith(item) else "" for item in after]
        ends = self._encode([item.rstrip(BROKEN) for item in usable])
        for start, lead, end in zip(starts, windows[::2], ends):
            if end and text.tokens[-len(end) :] == end:
                text.begin_at(start, lead, len(text.tokens) - len(end))
                return
        text.shorten_by_force(self.decode([text.lead_of(len(text.ids))])[0], reading)

    def decode(self, parts: list[list[int]]) -> list[str]:
        """Return tokens of the target's as characters."""
        return _decoded(self.tokenizer, parts)

    def decode_draft(self, parts: list[list[int]]) -> list[str]:
        """Return tokens of the draft's as characters."""
        return _decoded(self.assistant_tokenizer, parts)

    def encode_target(self, strings: list[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Return for every text the target's tokens, and where in it each begins and ends, in characters."""
        if not strings:
            return []
        found = self.tokenizer(
            strings,
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return list(zip(found.input_ids, found.offset_mapping))

    def _encode(self, strings: list[str]) -> list[list[int]]:
        return self.assistant_tokenizer(strings, add_special_tokens=False, verbose=False).input_ids


def _decoded(tokenizer: PreTrainedTokenizerBase, parts: list[list[int]]) -> list[str]:
    return tokenizer.batch_decode(parts, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return the tokens that are not text, named or added as special ones."""
    added = {str(token): number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids)) | added


def _own(tokenizer: PreTrainedTokenizerBase) -> tuple[PreTrainedTokenizerBase, bool]:
    """
    Return a copy of a tokenizer and True, or the tokenizer itself and False where parts in Python cannot be copied.
    """
    try:
        own = copy.deepcopy(tokenizer)
    except Exception:
        return tokenizer, False
    if own.is_fast:  # the post-processor may set that a token begins after its own space
        own.backend_tokenizer.post_processor = None
    return own, True


def _leading_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that the tokenizer puts before every text."""
    bare = tokenizer("a", add_special_tokens=False).input_ids
    whole = tokenizer("a").input_ids
    lengths = range(len(whole) - len(bare) + 1)
    return whole[: next((first for first in lengths if whole[first : first + len(bare)] == bare), 0)]
