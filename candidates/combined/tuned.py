"""Sources with the options that `smartspec tune` has found, and the file that it writes them to."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...files import replacing
from ..base import TreeCandidateGenerator
from ..text.datastore.source import DatastoreCandidates
from ..text.prompt_lookup import PromptLookupCandidates
from ..text.suffix.source import SuffixTreeCandidates
from .fused.sssd import SSSDCandidates

TUNABLE: dict[str, Callable[..., TreeCandidateGenerator]] = {
    "suffix": SuffixTreeCandidates,
    "datastore": DatastoreCandidates,
    "prompt_lookup": PromptLookupCandidates,
    "sssd": SSSDCandidates,
}
FUSED_OPTIONS = ("discounts", "num_nodes", "min_probability", "threshold", "calibrated")

_FORMAT = "hf-smartspec tuned sources"
_VERSION = 1


@dataclass(frozen=True)
class TunedSource:
    """
    One source with its options.

    Args:
        name (`str`): One of `TUNABLE`.
        options (`dict`): Arguments of its constructor.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> TreeCandidateGenerator:
        return TUNABLE[self.name](**self.options)


@dataclass(frozen=True)
class TunedSources:
    """
    Contents of a file of `smartspec tune`.

    Args:
        sources (tuple of `TunedSource`): At least one; "suffix" at most once.
        fused (`dict`): For several sources, or one with a drafter: arguments of `FusedCandidates` ("discounts",
            "num_nodes", "min_probability", "threshold"), and whether they are calibrated ("calibrated").
        found (`dict`): How they were found, for readers only.

    Raises:
        ValueError: for unknown names, and discounts that do not fit the sources.
    """

    sources: tuple[TunedSource, ...]
    fused: Mapping[str, Any] = field(default_factory=dict)
    found: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [source.name for source in self.sources]
        if not names or not set(names) <= set(TUNABLE) or names.count("suffix") > 1:
            raise ValueError(f"`sources` must be some of {list(TUNABLE)}, 'suffix' once at most; got {names}.")
        if not set(self.fused) <= set(FUSED_OPTIONS):
            raise ValueError(f"`fused` has the options {list(FUSED_OPTIONS)}, got {list(self.fused)}.")
        if len(self.fused.get("discounts", names)) != len(names):
            raise ValueError(f"`discounts` must be one per source, got {self.fused['discounts']!r} for {names}.")

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "TunedSources":
        """
        Build it from the plain form that files have; `KeyError`, `TypeError` or `ValueError` where that does not fit.
        """
        sources = tuple(TunedSource(str(item["name"]), dict(item["options"])) for item in content["sources"])
        return cls(sources, dict(content["fused"]), dict(content.get("found", {})))

    def save(self, path: str | os.PathLike) -> None:
        """Write the file, or replace it as a whole."""
        content = {
            "format": _FORMAT,
            "version": _VERSION,
            "sources": [{"name": source.name, "options": dict(source.options)} for source in self.sources],
            "fused": dict(self.fused),
            "found": dict(self.found),
        }
        with replacing(Path(path)) as file:
            file.write((json.dumps(content, indent=2) + "\n").encode())

    @classmethod
    def load(cls, path: str | os.PathLike) -> "TunedSources":
        """
        Read a file.

        Raises:
            FileNotFoundError: if there is none.
            ValueError: if it is damaged, of another kind or of another version, with the reason.
        """
        try:
            content = json.loads(Path(path).read_bytes())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is no file of `smartspec tune`, or damaged: {error}.") from error
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise ValueError(f"{path} is no file of `smartspec tune`.")
        if content.get("version") != _VERSION:
            raise ValueError(
                f"{path} has version {content.get('version')!r}, this release reads {_VERSION}. Tune anew."
            )
        try:
            return cls.of(content)
        except (KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is damaged: {error!r}. Tune anew.") from error
