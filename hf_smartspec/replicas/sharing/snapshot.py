"""File format of shared outputs: each with its replica and number, so that none is ever counted twice."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...candidates.text.suffix.files import column, making_sense, packed, texts_of, unpacked, words

_KIND = "outputs"
Key = tuple[str, int]  # the replica that served it, and its number there


class SharedOutput(NamedTuple):
    """A finished output."""

    replica: str  # the replica that served it
    number: int  # its number among the replica's outputs
    time: int  # time of publication, in nanoseconds since 1970
    namespace: str  # namespace of the requests that may draft from it
    tokens: np.ndarray  # `[length]` int32

    @property
    def key(self) -> Key:
        return self.replica, self.number


def pack(outputs: Sequence[SharedOutput], fingerprint: str) -> bytes:
    """Return the contents of a file; `fingerprint` is the tokenizer's."""
    names, replicas = _numbered([item.namespace for item in outputs]), _numbered([item.replica for item in outputs])
    header = {"kind": _KIND, "fingerprint": fingerprint, "names": list(names), "replicas": list(replicas)}
    arrays = {
        "tokens": np.concatenate([np.zeros(0, np.int32), *(item.tokens for item in outputs)]),
        "lengths": np.array([len(item.tokens) for item in outputs], np.int64),
        "numbers": np.array([item.number for item in outputs], np.int64),
        "times": np.array([item.time for item in outputs], np.int64),
        "namespaces": np.array([names[item.namespace] for item in outputs], np.int32),
        "served": np.array([replicas[item.replica] for item in outputs], np.int32),
    }
    return packed(header, arrays)


def unpack(data: bytes, fingerprint: str, name: str) -> list[SharedOutput]:
    """
    Return the outputs in a file's contents; raises `ValueError` if it is damaged, not complete, of another kind or of
    another tokenizer.
    """
    header, arrays = unpacked(data, name)
    if header.get("kind") != _KIND:
        raise ValueError(f"{name} holds no outputs of replicas.")
    if header.get("fingerprint") != fingerprint:
        raise ValueError(f"{name} was made with another tokenizer: its tokens mean something else.")
    with making_sense(name):
        names, replicas = words(header, "names"), words(header, "replicas")
        texts = [text.astype(np.int32) for text in texts_of(arrays)]
        num = len(texts)
        served = column(arrays, "served", num, below=len(replicas)).tolist()
        spaces = column(arrays, "namespaces", num, below=len(names)).tolist()
        counted = column(arrays, "numbers", num).tolist(), column(arrays, "times", num).tolist()
    return [
        SharedOutput(replicas[replica], number, time, names[space], tokens)
        for replica, number, time, space, tokens in zip(served, *counted, spaces, texts)
    ]


def _numbered(words: Sequence[str]) -> dict[str, int]:
    return {word: number for number, word in enumerate(dict.fromkeys(words))}
