"""Candidate sources and drafters by name, before anything is loaded."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from .arguments import UsageError

SOURCES = ("draft", "prompt_lookup", "suffix", "auto", "hybrid", "wrong")

WITH_DRAFT_MODEL = ("draft", "hybrid")


JOINT = "+"  # between the drafters of a list
_MODEL_FREE = ("suffix", "prompt_lookup")


def parts_of(name: str) -> list[str]:
    """The drafters of a list; a folder may have a plus sign in its name."""
    return [name] if Path(name).is_dir() else name.split(JOINT)


def is_model(item: str) -> bool:
    """Whether it is a folder or a hub id, not a preset."""
    return Path(item).is_dir() or ("/" in item and ":" not in item)


def has_models(name: str) -> bool:
    """Whether each is a model-free source by name or a model, and there is one of the latter: what can be new."""
    items = parts_of(name)
    return any(map(is_model, items)) and all(item in _MODEL_FREE or is_model(item) for item in items)


def shown(name: str) -> str:
    """Models by the last part of their name."""
    return JOINT.join(Path(item).name if is_model(item) else item for item in parts_of(name))


def check_distinct(names: Sequence[str], option: str) -> None:
    """Raises `UsageError` where two drafters would be shown under one name, and taken for one."""
    seen: dict[str, str] = {}
    for name in names:
        if (other := seen.setdefault(shown(name), name)) != name:
            raise UsageError(f"{option}: {other!r} and {name!r} are both shown as {shown(name)!r}; rename a folder")


def source_name(text: str) -> str:
    """One of `SOURCES`, or the folder or hub id of a learned drafter, alone or in a list, for argparse."""
    if text in SOURCES or has_models(text):
        return text
    raise argparse.ArgumentTypeError(
        f"must be one of {', '.join(SOURCES)}, or the folder of a learned drafter, also as suffix{JOINT}FOLDER, got "
        f"{text!r}"
    )
