"""Prompts of the peers, one by one or as a batch."""

from collections.abc import Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from hf_smartspec.commands.common.arguments import UsageError
from hf_smartspec.commands.common.models import encode, read_prompts

_MIXED = "mixed"


class Group(NamedTuple):
    """
    Prompts that are decoded in one turn.

    Args:
        text (`str`): Kind of the prompts.
        batch_size (`int`): Rows of a call.
        calls (list of lists of `int`): The prompts of every call, by number.
    """

    text: str
    batch_size: int
    calls: list[list[int]]


class Prompts(NamedTuple):
    """
    Args:
        ids (list of lists of `int`): Token ids of each prompt; no two are the same.
        texts (list of `str`): Kind of each prompt.
    """

    ids: list[list[int]]
    texts: list[str]

    @classmethod
    def read(cls, files: Sequence[str], tokenizer: PreTrainedTokenizerBase, max_len: int) -> "Prompts":
        """
        Return the prompts of files. Rows of .jsonl files are of the kind under "category", others of the kind "text".
        """
        found: dict[tuple[int, ...], str] = {}
        for file in files:
            for row in read_prompts(file):
                for ids in encode([row["prompt"]], tokenizer, max_len):
                    found.setdefault(tuple(ids), str(row.get("category", "text")))
        return cls([list(ids) for ids in found], list(found.values()))

    def groups(self, texts: Sequence[str], batch_sizes: Sequence[int], most: int) -> list[Group]:
        """
        Return prompts of these kinds: up to `most` of each one by one; as a batch where there are enough of a kind,
        else one batch of all kinds in turn.

        Raises:
            UsageError: for kinds that there are not, and batches of more rows than there are prompts.
        """
        unknown = set(texts) - set(self.texts)
        if unknown:
            raise UsageError(f"--texts: {min(unknown)!r} is none of {', '.join(sorted(set(self.texts)))}")
        return [group for size in batch_sizes for group in self._of_size(texts, size, most)]

    def _of_size(self, texts: Sequence[str], size: int, most: int) -> list[Group]:
        numbers = {text: self._numbers(text) for text in texts}
        if size == 1:
            return [Group(text, 1, [[number] for number in found[:most]]) for text, found in numbers.items()]
        large = [Group(text, size, [found[:size]]) for text, found in numbers.items() if len(found) >= size]
        return large or [Group(_MIXED, size, [self._mixed(size)])]

    def _numbers(self, text: str) -> list[int]:
        return [number for number, found in enumerate(self.texts) if found == text]

    def _mixed(self, size: int) -> list[int]:
        """Return the first prompt of every kind, then the second, and so on."""
        if size > len(self.ids):
            raise UsageError(f"--batch-sizes: {size} rows need as many different prompts; there are {len(self.ids)}")
        places = {number: self._numbers(text).index(number) for number, text in enumerate(self.texts)}
        return sorted(places, key=places.__getitem__)[:size]
