"""The datastore of SSSD's section 3.1.2: tokenised documents and their suffix array, in a file mapped into memory."""

import hashlib
import json
import os
import struct
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeAlias

import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import tqdm

from ....files import replacing
from ....validate import is_integer
from .sort import BORDER, sort_suffixes

Document: TypeAlias = str | Sequence[int] | np.ndarray

MAX_TOKENS = 2**31 - 1  # positions are int32
SORT_DEPTH = 64  # tokens; a longest match and what follows it must fit

_MAGIC = b"SSSDdata"
_VERSION = 1
_BATCH = 512  # documents tokenised at a time


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return 32 hex digits that two tokenizers share if the same ids mean the same tokens, added ones included."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items())).encode()
    return hashlib.blake2b(vocabulary, digest_size=16).hexdigest()


@dataclass(frozen=True, eq=False)
class Datastore:
    """
    Documents as token ids, and their suffixes in sorted order. Immutable; any number of sources may share one.

    Args:
        tokens (`np.ndarray` of shape `[num_tokens]`, int32): All documents, with -1 after each.
        suffixes (`np.ndarray` of shape `[num_suffixes]`, int32): Positions of all tokens but borders, sorted by what
            stands there.
        starts (`np.ndarray` of shape `[vocab_size + 1]`, int64): Suffixes in [starts[t], starts[t + 1]) begin with
            token t.
        sort_depth (`int`): Tokens that the order takes into account.
        fingerprint (`str`): The tokenizer's (see `tokenizer_fingerprint`); empty if unknown.
    """

    tokens: np.ndarray = field(repr=False)
    suffixes: np.ndarray = field(repr=False)
    starts: np.ndarray = field(repr=False)
    sort_depth: int = SORT_DEPTH
    fingerprint: str = ""

    @property
    def vocab_size(self) -> int:
        return len(self.starts) - 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all documents, borders left out."""
        return len(self.suffixes)

    @classmethod
    def from_documents(
        cls,
        documents: Iterable[Document],
        tokenizer: PreTrainedTokenizerBase | None = None,
        vocab_size: int | None = None,
        sort_depth: int = SORT_DEPTH,
    ) -> "Datastore":
        """
        Build a datastore in memory; it takes 8 bytes per token, and a little more while it is built.

        Args:
            documents: Texts, or token ids (in which -1 marks a border between documents as well).
            tokenizer (`PreTrainedTokenizerBase`, *optional*): Needed for texts, and for the fingerprint.
            vocab_size (`int`, *optional*): One more than the largest id that may occur; the tokenizer's own, or that
                of the documents, where not given.
            sort_depth (`int`): Tokens by which suffixes are sorted.

        Raises:
            ValueError: for ids outside the vocabulary, too many tokens, and texts without a tokenizer.
            TypeError: for documents of another kind.
        """
        if not is_integer(sort_depth) or sort_depth < 2:
            raise ValueError(f"`sort_depth` must be an integer of at least 2, got {sort_depth!r}.")
        if vocab_size is not None and (not is_integer(vocab_size) or not 1 <= vocab_size <= MAX_TOKENS):
            raise ValueError(f"`vocab_size` must be a positive integer, got {vocab_size!r}.")
        if vocab_size is None and tokenizer is not None:
            vocab_size = max(tokenizer.get_vocab().values()) + 1
        tokens = _join(documents, tokenizer, vocab_size)
        if vocab_size is None:
            vocab_size = int(tokens.max(initial=0)) + 1
        suffixes, starts = sort_suffixes(tokens, vocab_size, sort_depth)
        for part in (tokens, suffixes, starts):
            part.flags.writeable = False  # as when it comes from a file: the search is compiled for one kind only
        return cls(tokens, suffixes, starts, sort_depth, "" if tokenizer is None else tokenizer_fingerprint(tokenizer))

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        tokenizer: PreTrainedTokenizerBase | None = None,
        verify: bool = True,
    ) -> "Datastore":
        """
        Map a file into memory: pages are read when they are needed, and shared between processes.

        Args:
            path (`str` or `os.PathLike`): A file that `save` or `build_datastore` wrote.
            tokenizer (`PreTrainedTokenizerBase`, *optional*): Must be the one that the file was built with.
            verify (`bool`): Whether to read the file once and compare its checksum (about 1 GB/s). Its header and
                size are always checked. Damage that goes unseen can lead to useless drafts only.

        Raises:
            OSError: if the file cannot be read.
            ValueError: if it is no datastore, damaged, of another version or of another tokenizer.
        """
        with open(path, "rb") as file:
            header = _Header.read(file, path)
            data = np.memmap(file, np.uint8, mode="r").view(np.ndarray)[_LAYOUT.size :]
        if verify and zlib.crc32(data.data) != header.data_crc:
            raise ValueError(f"{os.fspath(path)!r} is damaged: the checksum of its data is wrong. Build it again.")
        sections = header.sections
        starts, tokens, suffixes = np.split(data, np.cumsum(sections[:-1]))
        fingerprint = header.fingerprint.rstrip(b"\0").decode()
        store = cls(
            tokens.view(np.int32), suffixes.view(np.int32), starts.view(np.int64), header.sort_depth, fingerprint
        )
        if tokenizer is not None:
            store.check_tokenizer(tokenizer, os.fspath(path))
        return store

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase, name: str = "The datastore") -> None:
        """Raise `ValueError` unless the documents were tokenised with this tokenizer."""
        if not self.fingerprint:
            raise ValueError(f"{name} does not say which tokenizer it was built with. Build it with `tokenizer=...`.")
        if self.fingerprint != tokenizer_fingerprint(tokenizer):
            raise ValueError(
                f"{name} was built with another tokenizer: its tokens mean something else here. Build one with "
                "this tokenizer."
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file atomically: readers of `path` find the old contents, or all of the new ones."""
        parts = self.starts, self.tokens, self.suffixes
        data = [np.ascontiguousarray(part).view(np.uint8).data for part in parts]
        checksum = 0
        for part in data:
            checksum = zlib.crc32(part, checksum)
        sizes = len(self.tokens), len(self.suffixes), self.vocab_size
        header = _Header(_MAGIC, _VERSION, self.sort_depth, *sizes, self.fingerprint.encode(), checksum)
        with replacing(Path(path), is_private=True) as file:
            file.write(header.pack())
            for part in data:
                file.write(part)


def build_datastore(
    documents: Iterable[Document],
    path: str | os.PathLike[str],
    tokenizer: PreTrainedTokenizerBase | None = None,
    vocab_size: int | None = None,
    sort_depth: int = SORT_DEPTH,
) -> Datastore:
    """
    Build a datastore (see `Datastore.from_documents`), write it to `path` and return it. An interrupted build leaves no
    file, and of two builds at once, the later one's file stays.

    Example:

    ```python
    build_datastore(["The answer is 42.", "The answer is no."], "answers.sssd", tokenizer)
    output = model.generate(**inputs, assistant=DatastoreCandidates("answers.sssd"))
    ```
    """
    if not Path(path).absolute().parent.is_dir() or Path(path).is_dir():
        raise ValueError(f"`path` must name a file in an existing folder, got {os.fspath(path)!r}.")
    store = Datastore.from_documents(documents, tokenizer, vocab_size, sort_depth)
    store.save(path)
    return store


def _join(
    documents: Iterable[Document], tokenizer: PreTrainedTokenizerBase | None, vocab_size: int | None
) -> np.ndarray:
    """Return all documents in one int32 array, with a border after each."""
    if isinstance(documents, str | bytes):
        raise TypeError("`documents` must be an iterable of documents, got one text. Pass a list.")
    limit = MAX_TOKENS if vocab_size is None else vocab_size
    tokens = array("i")
    iterator = iter(tqdm(documents, desc="reading", unit="doc", delay=1))
    while batch := list(islice(iterator, _BATCH)):
        for ids in _tokenise(batch, tokenizer):
            tokens.frombytes(_checked(ids, limit).tobytes())
            tokens.append(BORDER)
        if len(tokens) > MAX_TOKENS:
            raise ValueError(f"A datastore holds at most {MAX_TOKENS} tokens, got more. Build several.")
    return np.frombuffer(tokens, np.int32)


def _tokenise(batch: list[Document], tokenizer: PreTrainedTokenizerBase | None) -> Iterator[Sequence[int] | np.ndarray]:
    texts = [document for document in batch if isinstance(document, str)]
    if texts and tokenizer is None:
        raise ValueError("Texts need a tokenizer: pass `tokenizer=...`, or documents of token ids.")
    # Not verbose: documents may be longer than the model's context.
    encoded = iter(tokenizer(texts, add_special_tokens=False, verbose=False).input_ids if texts and tokenizer else [])
    for document in batch:
        yield next(encoded) if isinstance(document, str) else document


def _checked(document: Sequence[int] | np.ndarray, limit: int) -> np.ndarray:
    ids = np.asarray(document)
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        raise TypeError(f"A document must be a text or a sequence of token ids, got {type(document).__name__}.")
    if ids.size and not BORDER <= ids.min() <= ids.max() < limit:
        raise ValueError(f"Token ids must lie in [0, {limit}), or be -1 for a border; got {ids.min()} to {ids.max()}.")
    return ids.astype(np.int32)


_LAYOUT = struct.Struct("<8sIIQQQ32sI48xI")  # the last number is the checksum of all before it; 128 bytes in all


class _Header(NamedTuple):
    """The beginning of a file. The data follow, `starts`, `tokens` and `suffixes` one after another, little-endian."""

    magic: bytes
    version: int
    sort_depth: int
    num_tokens: int  # borders included
    num_suffixes: int
    vocab_size: int
    fingerprint: bytes
    data_crc: int

    @property
    def sections(self) -> tuple[int, int, int]:
        """Return the sizes of the data's parts, in bytes."""
        return 8 * (self.vocab_size + 1), 4 * self.num_tokens, 4 * self.num_suffixes

    def pack(self) -> bytes:
        packed = _LAYOUT.pack(*self, 0)[:-4]
        return packed + struct.pack("<I", zlib.crc32(packed))

    @classmethod
    def read(cls, file: BinaryIO, path: str | os.PathLike[str]) -> "_Header":
        """Read it; raise `ValueError` unless the file is a whole datastore of this version."""
        name = repr(os.fspath(path))
        packed = file.read(_LAYOUT.size)
        if not packed.startswith(_MAGIC):
            raise ValueError(f"{name} is no datastore. Build one with `smartspec datastore build`.")
        if len(packed) < _LAYOUT.size:
            raise ValueError(f"{name} is cut off: its header has {len(packed)} of {_LAYOUT.size} bytes.")
        *values, checksum = _LAYOUT.unpack(packed)
        header = cls(*values)
        # The version comes first, since another one may compute its checksum otherwise.
        if header.version != _VERSION:
            raise ValueError(
                f"{name} is a datastore of version {header.version} and this library reads version {_VERSION}, or its "
                "header is damaged. Build it again."
            )
        if zlib.crc32(packed[:-4]) != checksum:
            raise ValueError(f"{name} is damaged: the checksum of its header is wrong. Build it again.")
        expected, size = _LAYOUT.size + sum(header.sections), os.fstat(file.fileno()).st_size
        if size != expected:
            raise ValueError(f"{name} has {size} bytes instead of {expected}: it was cut off or added to.")
        return header
