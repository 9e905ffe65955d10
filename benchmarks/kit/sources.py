"""Candidate sources by name, for all benches."""

from collections.abc import Callable, Iterable
from functools import partial

from hf_smartspec.candidates import DraftModelCandidates
from hf_smartspec.commands.common.setup import Setup
from hf_smartspec.goodput import NoSpeculation
from hf_smartspec.prepare.config import SmartSpecConfig

NONE = "none"
NewConfig = Callable[[], SmartSpecConfig]


def sources_by_name(names: Iterable[str], setup: Setup) -> dict[str, NewConfig]:
    """
    Return functions that make the configuration of each source. Every call makes a new source, which has learnt nothing
    but what the set-up remembers.

    Args:
        names (iterable of `str`): "none", or a name that `Setup.new_source` takes. "suffix:8" drafts 8 nodes per row,
            "draft:9:3" drafts 9 nodes in trees of width 3; without numbers, goodput decides.
    """
    return {name: partial(_new_config, name, setup) for name in names}


def _new_config(name: str, setup: Setup) -> SmartSpecConfig:
    kind, *numbers = [name] if name in setup.learned else name.split(":")
    if kind == NONE:
        return SmartSpecConfig(NONE, policy=NoSpeculation())
    num_nodes, width = [*map(int, numbers), None, None][:2]
    drafter = DraftModelCandidates(setup.draft, width=width) if width and setup.draft else None
    return SmartSpecConfig(setup.new_source(kind, drafter), num_nodes=num_nodes)
