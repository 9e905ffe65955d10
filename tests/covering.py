"""
Products of parametrisations are long, and each further case says less: `make test` runs a part of them that has every
value, and every pair of values where more than two are combined; `make test-all` runs the whole.
"""

import os
from collections import defaultdict
from collections.abc import Collection, Hashable, Sequence
from itertools import combinations
from typing import Any

import pytest

IS_EXHAUSTIVE = os.environ.get("HF_SMARTSPEC_EXHAUSTIVE", "0") not in ("", "0")


def covering(cases: Sequence[Sequence[Hashable]]) -> list[int]:
    """
    Places of the cases that are run, in their order. Of three and more parametrisations, any two values that can meet
    do so; of two, every value is there once.
    """
    differing = [place for place in range(len(cases[0])) if len({case[place] for case in cases}) > 1]
    if len(differing) < 2:
        return list(range(len(cases)))
    values = [[(place, case[place]) for place in differing] for case in cases]
    if len(differing) == 2:
        return _greedy(values)
    return _greedy([list(combinations(own, 2)) for own in values])


def _greedy(gives: Sequence[Sequence[Hashable]]) -> list[int]:
    """Cases that together give everything: each the first that gives most of what is left."""
    left = {item for own in gives for item in own}
    found: list[int] = []
    while left:
        gains = [len(left.intersection(own)) for own in gives]
        found.append(gains.index(max(gains)))
        left.difference_update(gives[found[-1]])
    return sorted(found)


def exhaustive(*cases: Sequence) -> list[Any]:
    """Return the cases, tuples of values, as parameters that `make test-all` runs: others cover what they test."""
    return [pytest.param(*case, marks=pytest.mark.exhaustive) for case in cases]


def part_of(cases: Collection, *kept: Hashable) -> list[Any]:
    """Return the cases as parameters, of which `make test` runs those to be kept, and `make test-all` all of them."""
    assert set(kept) <= set(cases)
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [case if case in kept else exhaustive(own)[0] for case, own in zip(cases, values)]


def examples(number: int) -> int:
    """Return the number of examples of a property-based test: that one in `make test-all`, a third in `make test`."""
    return number if IS_EXHAUSTIVE else -(-number // 3)


def in_part(items: Sequence) -> list:
    """Those of the collected tests that are run."""
    groups: dict[str, list] = defaultdict(list)
    for item in items:
        groups[item.nodeid.split("[")[0]].append(item)
    left_out = set()
    for group in groups.values():
        # Of each parametrisation, what stands in the test's name.
        cases = [tuple(getattr(item.callspec, "_idlist", ())) if hasattr(item, "callspec") else () for item in group]
        if len({len(case) for case in cases}) == 1:
            run = set(covering(cases))
            left_out |= {item for place, item in enumerate(group) if place not in run}
    return [item for item in items if item not in left_out]
