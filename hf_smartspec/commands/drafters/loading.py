"""Drafters by name: for the target as it is, and for the same target enlarged."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from ...candidates.heads.kinds import load, source_of
from ...candidates.heads.learned import LearnedDrafter
from ...goodput.acceptance import Calibrator
from ...prepare.resolve import resolve
from ..common.demo import find_demo
from ..common.models import UsageError, load_draft
from .narrowed import NarrowedCandidates

JOINT = "+"  # between the drafters of a list
_FIRST = ("suffix", "draft")  # what others are compared with


class Drafter(NamedTuple):
    """
    Args:
        name (`str`): Shown in tables.
        assistant: What `assistant=` is.
        num_parameters (`int`): Its own, beside those that it shares with the target.
    """

    name: str
    assistant: Any
    num_parameters: int


def default_names() -> list[str]:
    """Suffix trees, the demo's trained drafters, and lists of suffix trees and each of these."""
    demo = find_demo()
    folders = sorted((demo / "models").iterdir()) if demo else []
    found = [folder for folder in folders if (folder / "config.json").is_file() and folder.name != "target"]
    trained = [str(folder) for folder in sorted(found, key=lambda folder: folder.name not in _FIRST)]
    return ["suffix", *trained, *(f"suffix{JOINT}{name}" for name in trained)]


def load_drafters(
    names: Sequence[str], target: PreTrainedModel, larger: PreTrainedModel | None = None
) -> list[Drafter]:
    """
    Those that are named, lists joined by plus signs.

    Args:
        target (`PreTrainedModel`): What they were trained for.
        larger (`PreTrainedModel`, *optional*): The same enlarged, which they are to draft for.

    Raises:
        UsageError: for a name that means nothing, or a drafter of another target.
    """
    known: dict[str, tuple[Any, int]] = {}
    drafters = []
    for name in dict.fromkeys(names):
        items = parts_of(name)
        for item in items:
            if item not in known:
                known[item] = _loaded(item, target, larger)
        assistants = [known[item][0] for item in items]
        assistant = assistants if len(items) > 1 else assistants[0]
        try:
            resolve(assistant, larger or target)
        except (TypeError, ValueError, OSError) as error:
            raise UsageError(f"--drafters: {error}") from error
        drafters.append(Drafter(shown(name), assistant, sum(known[item][1] for item in items)))
    return drafters


def parts_of(name: str) -> list[str]:
    """The drafters of a list; a folder may have a plus sign in its name."""
    return [name] if Path(name).is_dir() else name.split(JOINT)


def shown(name: str) -> str:
    return JOINT.join(Path(item).name if Path(item).is_dir() else item for item in parts_of(name))


def _loaded(item: str, target: PreTrainedModel, larger: PreTrainedModel | None) -> tuple[Any, int]:
    """What `assistant=` is, and its parameters."""
    if not (Path(item).is_dir() or ("/" in item and ":" not in item)):
        return item, 0
    try:
        heads = load(item, target)
    except (ValueError, OSError) as error:
        raise UsageError(f"--drafters: {error}") from error
    if heads is None:
        draft = load_draft(item, target, str(target.dtype).removeprefix("torch."))
        return draft, draft.num_parameters()
    return (heads if larger is None else _narrowed(heads, target)), _num_own(heads, target)


def _narrowed(heads: LearnedDrafter, target: PreTrainedModel) -> NarrowedCandidates:
    size: int = target.config.get_text_config(decoder=True).hidden_size
    return NarrowedCandidates(source_of(heads, Calibrator(), None), size)


def _num_own(heads: nn.Module, target: PreTrainedModel) -> int:
    shared = {item.data_ptr() for item in target.parameters()}
    return sum(item.numel() for item in heads.parameters() if item.data_ptr() not in shared)
