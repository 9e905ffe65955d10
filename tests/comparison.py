"""Runs cases and compares them with plain `generate`; every difference is explained."""

from collections import Counter

import torch

import hf_smartspec
from hf_smartspec import SmartSpecConfig, TreeCandidateGenerator

from .cases import Case, all_cases
from .conftest import COUNTS
from .sources import Recording
from .ties import Difference, first_difference

ALWAYS_DRAFT = ("draft", "foreign", "oracle", "wrong")


class Tally:
    """Counts of many comparisons."""

    def __init__(self):
        self.counts: Counter = Counter()
        self.by_kind: dict[str, Counter] = {}
        self.differences: list[Difference] = []

    def add(self, case: Case, recording: Recording, num_tokens: int, differences: list[Difference]) -> None:
        ties = sum(difference.tie is not None for difference in differences)
        counts = {
            "cases": 1,
            "tokens": num_tokens,
            "drafted": recording.drafted,
            "accepted": recording.accepted,
            "ties": ties,
            "differences": len(differences) - ties,
        }
        self.counts.update(counts)
        self.by_kind.setdefault(case.kind, Counter()).update(counts)
        self.differences += differences

    @property
    def faults(self) -> str:
        return "\n".join(str(item) for item in self.differences if item.tie is None)

    def report(self, record_property) -> None:
        ties = [str(item) for item in self.differences if item.tie is not None]
        record_property(COUNTS, {"counts": dict(self.counts), "ties": ties})


def speculate(
    case: Case, reference: torch.Tensor, source: TreeCandidateGenerator | None = None, **arguments
) -> tuple[torch.Tensor, Recording]:
    """`generate` with the case's source, or another one: tokens `[batch, length]`, and what the source saw."""
    setting = case.setting
    recording = Recording(source or case.source(reference))
    with hf_smartspec.enabled(setting.model):
        output = setting.model.generate(
            **setting.speculative_arguments(),
            assistant=SmartSpecConfig(recording, num_nodes=case.num_nodes),
            return_dict_in_generate=case.returns_dict,
            **arguments,
        )
    if not case.returns_dict:
        return output, recording
    recording.statistics = output.statistics
    return output.sequences, recording


def compare(case: Case, reference: torch.Tensor, tally: Tally, **arguments) -> Recording:
    """Runs one case and counts its differences from the reference, each explained."""
    setting = case.setting
    actual, recording = speculate(case, reference, **arguments)
    if recording.errors and case.kind != "flaky":
        raise AssertionError(f"{case.name}: the source failed") from recording.errors[0]
    width = setting.inputs["input_ids"].shape[1]
    assert torch.equal(actual[:, :width], setting.inputs["input_ids"])
    differences = []
    for row, (expected_row, actual_row) in enumerate(zip(reference[:, width:].tolist(), actual[:, width:].tolist())):
        rows = setting.continuation(expected_row), setting.continuation(actual_row)
        if rows[0] != rows[1]:
            differences.append(first_difference(case.name, setting, row, *rows))
    if not differences:
        assert torch.equal(actual, reference), f"{case.name}: rows are equal but their padding is not"
        if case.kind != "flaky":  # what a dropped source is not told of, it did not see
            assert list(recording.texts.values()) == setting.texts(reference), (
                f"{case.name}: the source saw another text"
            )
    assert recording.is_idle, f"{case.name}: the source was not told of a request's end"
    if case.kind in ALWAYS_DRAFT and reference.shape[1] > width + 1:
        assert recording.drafted > 0, f"{case.name}: nothing was drafted"
    if case.kind == "wrong":
        assert recording.accepted == 0, f"{case.name}: something wrong was accepted"
    num_tokens = sum(len(text) for text in setting.texts(reference)) - sum(map(len, setting.prompts))
    tally.add(case, recording, num_tokens, differences)
    return recording


def run_cases(architecture: str, count: int, first: int = 0, in_turns: bool = False, **options) -> Tally:
    """
    Compare all cases of the settings. `in_turns`, the even ones of one setting and the odd ones of the next: draft
    models and lookup as chains and as trees; and both times suffixes, which are not continued in every text.
    """
    tally = Tally()
    for number, (setting, cases) in enumerate(all_cases(architecture, count, first, **options)):
        reference = setting.reference()
        for place, case in enumerate(cases):
            if not in_turns or (number + place) % 2 == 0 or case.kind == "suffix":
                compare(case, reference, tally)
    return tally
