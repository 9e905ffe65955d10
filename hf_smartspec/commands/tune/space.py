"""The space that `smartspec tune` searches, and the sources of a choice."""

import copy
import inspect
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...candidates import FusedCandidates, SSSDCandidates, TreeCandidateGenerator
from ...candidates.base import TYPICAL_NODES
from ...candidates.combined.tuned import TUNABLE, TunedSources
from ...candidates.text.suffix.source import LEAST_PROBABILITY
from ..common.arguments import UsageError, usage_errors
from ..replay.sources import build_tuned, plain_options

# A choice in the plain form that a file has (`TunedSources.of`): {"sources": [{"name", "options"}], "fused": {...}}.
Choice = dict[str, Any]

_NODES = (2, 4, 8, 16, 32)
_PROBABILITIES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
_DISCOUNTS = (1.0, 0.95, 0.9, 0.8, 0.65, 0.5)
_SHORT_MATCHES = (1.0, 0.8, 0.65, 0.5, 0.35, 0.2)
_THRESHOLDS = (None, 0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0)  # None: learnt while decoding

# Options of a source, the most important first. The number of nodes goes by two names.
_GRIDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "suffix": {
        "min_probability": _PROBABILITIES,
        "num_nodes": _NODES,
        "max_match": (4, 8, 16, 24, 32),
        "factor": (0.5, 1.0, 2.0, 4.0, 8.0),
        "offset": (0.0, 1.0, 2.0, 4.0),
    },
    "datastore": {
        "num_nodes": _NODES,
        "max_prefix": (3, 4, 6, 8, 12),
        "min_continuations": (1, 3, 10, 30),
        "branch_len": (4, 8, 12),
    },
    "sssd": {
        "scale": (1.0, 0.8, 0.65, 0.5, 0.35),
        "short": (1.0, 0.9, 0.8, 0.65, 0.5),
        "deep": (1.0, 0.95, 0.9, 0.8),
        "num_nodes": _NODES,
        "min_continuations": (1, 3, 10, 30),
        "breadth": (1, 2, 3, 4),
    },
    "prompt_lookup": {"num_tokens": _NODES, "max_ngram": (2, 3, 4, 6, 8), "min_ngram": (1, 2, 3)},
}
_DEFAULTS = {"num_nodes": TYPICAL_NODES, "min_probability": LEAST_PROBABILITY}  # where the default is None
_NODE_OPTIONS = ("num_nodes", "num_tokens")
_OF_COUNTS = ("factor", "offset")  # options of scoring="counts" only
_OF_DATASTORE = ("min_continuations", "breadth")
_MATCHING = ("datastore", "prompt_lookup")  # sources whose nodes have match lengths


class Parameter(NamedTuple):
    """An option with the values to try."""

    label: str
    path: tuple[str | int, ...]  # to its place in a choice
    values: tuple[Any, ...]


class Space(NamedTuple):
    """The choice to begin with, and the parameters to tune."""

    default: Choice
    parameters: list[Parameter]


def space_of(texts: Sequence[str], num_nodes: int | None = None) -> Space:
    """
    Return sources with the defaults of all options that can be tuned, and these options, except those that are given.

    Args:
        texts (sequence of `str`): "NAME[:VALUE,OPTION=VALUE,...]" of each source.
        num_nodes (`int`, *optional*): Draft nodes per row and step, if these are not to be tuned.

    Raises:
        UsageError: for an unknown source, or options that it does not have.
    """
    is_alone = len(texts) == 1
    sources: list[dict[str, Any]] = []
    parameters: list[Parameter] = []
    for index, text in enumerate(texts):
        name, given = _parsed(text)
        accepted = inspect.signature(TUNABLE[name]).parameters
        if num_nodes is not None and is_alone:
            given |= {option: num_nodes for option in _NODE_OPTIONS if option in accepted}
        tuned = [option for option in _GRIDS[name] if option not in given and _matters(option, given, is_alone)]
        defaults = {option: accepted[option].default for option in tuned}
        defaults |= {option: _DEFAULTS[option] for option, default in defaults.items() if default is None}
        sources.append({"name": name, "options": defaults | given})
        parameters += [
            Parameter(f"{name} {option}", ("sources", index, "options", option), _GRIDS[name][option])
            for option in tuned
        ]
    choice: Choice = {"sources": sources, "fused": {} if is_alone else {"calibrated": True}}
    with usage_errors("--sources"):
        source = build(choice)
    if not is_alone and isinstance(source, FusedCandidates):
        choice["fused"] |= {
            "num_nodes": num_nodes or source.default_num_nodes,
            "min_probability": source.min_probability,
            "discounts": [list(discount) for discount in source.discounts],
        }
        parameters += _of_fusion(choice, num_nodes is not None)
    return Space(choice, parameters)


def calibrated(space: Space, texts: Sequence[tuple[np.ndarray, np.ndarray]]) -> Space:
    """Return the space with factors measured on these texts, prompts and responses, for SSSD (its section 3.1.3)."""
    parameters = list(space.parameters)
    for index, item in enumerate(space.default["sources"]):
        if item["name"] == "sssd" and "calibration" not in item["options"]:
            source = build({"sources": [item], "fused": {}})
            assert isinstance(source, SSSDCandidates)
            path = ("sources", index, "options", "calibration")
            parameters.append(Parameter("sssd calibration", path, (None, source.calibrate(texts))))
    return Space(space.default, parameters)


def _parsed(text: str) -> tuple[str, dict[str, Any]]:
    """Return name and given options of a source, with absolute paths, since the output may be used in other folders."""
    name, _, rest = text.partition(":")
    if name not in TUNABLE:
        raise UsageError(f"--sources: {name!r} cannot be tuned; known are {', '.join(TUNABLE)}")
    values, given = plain_options(rest)
    given = dict(zip(inspect.signature(TUNABLE[name]).parameters, values)) | given
    if "datastore" in given:
        given["datastore"] = os.path.abspath(str(given["datastore"]))
    return name, given


def _matters(option: str, given: dict[str, Any], is_alone: bool) -> bool:
    """Return whether an option has an effect: several sources share one number of nodes."""
    if option in _NODE_OPTIONS:
        return is_alone
    if option in _OF_DATASTORE and "datastore" not in given:
        return False
    return option not in _OF_COUNTS or given.get("scoring") == "counts"


def _of_fusion(choice: Choice, is_limited: bool) -> list[Parameter]:
    found = [] if is_limited else [Parameter("num_nodes", ("fused", "num_nodes"), _NODES)]
    found.append(Parameter("min_probability", ("fused", "min_probability"), _PROBABILITIES))
    for index, source in enumerate(choice["sources"]):
        for level, where in enumerate(("first", "further")):
            path = ("fused", "discounts", index, level)
            found.append(Parameter(f"{source['name']} discount, {where}", path, _DISCOUNTS))
        if source["name"] in _MATCHING:
            path = ("fused", "discounts", index, 2)
            found.append(Parameter(f"{source['name']} discount, short matches", path, _SHORT_MATCHES))
    return [*found, Parameter("calibrated", ("fused", "calibrated"), (True, False))]


THRESHOLD = Parameter("threshold", ("fused", "threshold"), _THRESHOLDS)


def value_of(choice: Choice, parameter: Parameter) -> Any:
    """Return the parameter's value in a choice, or None."""
    place: Any = choice
    for key in parameter.path[:-1]:
        place = place[key]
    return place.get(parameter.path[-1]) if isinstance(place, dict) else place[parameter.path[-1]]


def changed(choice: Choice, parameter: Parameter, value: Any) -> Choice:
    """Return a copy of the choice with another value of one parameter."""
    choice = copy.deepcopy(choice)
    place: Any = choice
    for key in parameter.path[:-1]:
        place = place[key]
    place[parameter.path[-1]] = value
    return choice


def build(choice: Choice, drafter: TreeCandidateGenerator | None = None) -> TreeCandidateGenerator:
    """Return the source of a choice; raises `ValueError` or `TypeError` for values that do not fit."""
    return build_tuned(TunedSources.of(choice), drafter)
