"""Names of candidate sources and drafters, checked before anything is loaded."""

import argparse
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from .arguments import UsageError

SOURCES = ("draft", "prompt_lookup", "suffix", "sssd", "auto", "hybrid", "wrong")
WITH_DRAFT_MODEL = ("draft", "hybrid")
JOINT = "+"  # between the drafters of a list
_MODEL_FREE = ("suffix", "suffix_decoding", "prompt_lookup", "pld", "sssd", "token_recycling")


def parts_of(name: str) -> list[str]:
    """
    Return the drafters of a list joined by plus signs; the name of a folder, which may contain one, is not split. Raise
    `UsageError` for an empty one.
    """
    parts = [name] if Path(name).is_dir() else name.split(JOINT)
    if not all(parts):
        raise UsageError(f"the name of a drafter is empty in {name!r}")
    return parts


def is_model(item: str) -> bool:
    """Return whether the item is a folder or a hub id, not a preset."""
    return Path(item).is_dir() or ("/" in item and ":" not in item)


def has_models(name: str) -> bool:
    """Return whether a name stands for models, or for models and model-free sources: new objects can be made of it."""
    items = parts_of(name)
    return any(map(is_model, items)) and all(item in _MODEL_FREE or is_model(item) for item in items)


def shown(name: str) -> str:
    """Return the name as tables show it: models by the last part of their path."""
    return JOINT.join(Path(item).name if is_model(item) else item for item in parts_of(name))


def check_distinct(names: Sequence[str], option: str) -> None:
    """Raise `UsageError` if two drafters would have the same name in tables."""
    seen: dict[str, str] = {}
    for name in names:
        if (other := seen.setdefault(shown(name), name)) != name:
            raise UsageError(f"{option}: {other!r} and {name!r} are both shown as {shown(name)!r}; rename a folder")


def source_name(text: str) -> str:
    """Return the name of a source from the command line: one of `SOURCES`, or learned drafters by folder or hub id."""
    with suppress(UsageError):  # of an empty name
        if text in SOURCES or has_models(text):
            return text
    raise argparse.ArgumentTypeError(
        f"must be one of {', '.join(SOURCES)}, or the folder of a learned drafter, also as suffix{JOINT}FOLDER, got "
        f"{text!r}"
    )


def check_simulated(names: Sequence[str], is_simulated: bool) -> None:
    """Raise `UsageError` for learned drafters in simulations, which have no hidden states."""
    learned = [name for name in names if name not in SOURCES]
    if learned and is_simulated:
        raise UsageError(
            f"{learned[0]!r} drafts on the real engine only: simulations have no hidden states, and the policy 'table' "
            "is made by one"
        )
