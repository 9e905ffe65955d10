"""What drafters do on each kind of text: rows, by part of the bench, kind, batch size and drafter."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedModel

from hf_smartspec.candidates import MedusaCandidates, MedusaHeads
from hf_smartspec.commands.common.data_sets import DataSet, answered
from hf_smartspec.commands.common.drafters import Drafter
from hf_smartspec.commands.common.recordings import Recording
from hf_smartspec.commands.speed.loop import PLAIN, Method, Results, Settings, Tally, measure
from hf_smartspec.commands.speed.report import num_different
from hf_smartspec.goodput import Calibrator

from .arguments import SPEED, STEPS, TREES
from .trees import accuracies, best_fixed_tree

NONE, MIXED = "none", "mixed"
CALIBRATED, RAW, FIXED = "calibrated trees", "trees by raw probabilities", "the best fixed tree"
_WARM_UP = 8  # tokens
_ANSWERED = 8  # at once
_APART = 10**6  # rows of one half and of the other

Row = dict[str, Any]


class Place(NamedTuple):
    """Where drafters are measured: nodes of a draft, 0 where goodput decides."""

    part: str
    kind: str
    batch_size: int
    nodes: int

    def __str__(self) -> str:
        return f"{self.part}, {self.kind}{f', {self.nodes} nodes' * bool(self.nodes)}"


@dataclass
class Rows:
    """
    What has been measured, in the order in which it was.

    Args:
        rows (list of `dict`): One for each place and drafter.
    """

    rows: list[Row]

    def missing(self, place: Place, names: Iterable[str]) -> list[str]:
        """The drafters that have not been measured there."""
        found = [row["drafter"] for row in self.rows if _place_of(row) == place]
        return [name for name in names if name not in found]

    def add(self, place: Place, tallies: dict[str, Tally]) -> None:
        for name in self.missing(place, tallies):
            self.rows.append(place._asdict() | {"drafter": name} | _figures(tallies[name], tallies[PLAIN]))


def _place_of(row: Row) -> Place:
    return Place(*(row[name] for name in Place._fields))


def _figures(tally: Tally, plain: Tally) -> Row:
    row: Row = {"statistics": tally.statistics.as_dict()}
    row |= {
        "num_different": num_different(tally),
        "num_tied": sum(item.is_tie for item in tally.differences.values()),
    }
    if tally.calls:
        seconds = [call.decode_seconds_per_token for call in tally.calls]
        row |= {"speedup": tally.speedup(plain), "decode_speedup": tally.decode_speedup(plain)}
        row |= {"decode_seconds_per_token": float(np.nanmedian(seconds))}
    return row


class DrafterBench:
    """
    Args:
        rows (`Rows`): Filled in, kind by kind; what is there is not measured again.
        max_new_tokens, num_nodes (list), width, repetitions: As the command's arguments.
    """

    def __init__(self, rows: Rows, max_new_tokens: int, num_nodes: Sequence[int], width: int, repetitions: int):
        self.rows, self.max_new_tokens, self.num_nodes = rows, max_new_tokens, num_nodes
        self.width, self.repetitions = width, repetitions

    def steps(self, target: PreTrainedModel, drafters: Sequence[Drafter], data: Sequence[DataSet]) -> Iterable[None]:
        """One prompt at a time with so many nodes at every step; of times, only those of drafting count."""
        for num in self.num_nodes:
            methods = [Method(NONE, NONE), *(self._with_nodes(item, num) for item in drafters)]
            yield from self._each([Place(STEPS, item.name, 1, num) for item in data], target, methods, data, 0)

    def speed(
        self, target: PreTrainedModel, drafters: Sequence[Drafter], data: Sequence[DataSet], batch_sizes: Sequence[int]
    ) -> Iterable[None]:
        """Goodput decides how much. Larger batches have rows of all kinds, taking turns."""
        methods = [Method(item.name, item.assistant) for item in drafters]
        for size in batch_sizes:
            texts = data if size == 1 else [mixed(data)]
            places = [Place(SPEED, item.name, min(size, len(item.prompts)), 0) for item in texts]
            yield from self._each(places, target, methods, texts, self.repetitions)

    def trees(self, target: PreTrainedModel, heads: dict[str, MedusaHeads], data: Sequence[DataSet]) -> Iterable[None]:
        """
        Each half of the prompts with a tree that is the best one of the answers to the other half, against trees that
        are chosen anew at every step.
        """
        halves = [[_part(item, half) for item in data] for half in (0, 1)]
        for name, own in heads.items():
            places = [Place(TREES, item.name, 1, max(self.num_nodes)) for item in data]
            if any(self.rows.missing(place, [f"{name}, {FIXED}"]) for place in places):
                learning = {CALIBRATED: MedusaCandidates(own, calibrator=Calibrator()), RAW: MedusaCandidates(own)}
                found: dict[str, dict[str, Tally]] = {}
                for half, other in (halves, halves[::-1]):
                    for kind, tallies in self._half(target, name, own, learning, half, other).items():
                        found[kind] = _joined(found[kind], tallies) if kind in found else tallies
                for place in places:
                    self.rows.add(place, found[place.kind])
                yield

    def _half(
        self,
        target: PreTrainedModel,
        name: str,
        heads: MedusaHeads,
        learning: dict[str, MedusaCandidates],
        half: Sequence[DataSet],
        other: Sequence[DataSet],
    ) -> dict[str, dict[str, Tally]]:
        """By kind, what all kinds of trees do on a half of the prompts."""
        num = max(self.num_nodes)
        tree = best_fixed_tree(accuracies(heads, target, self._answers(target, other)), num)
        sources = learning | {FIXED: MedusaCandidates(heads, tree=tree)}
        methods = [Method(f"{name}, {kind}", item, options={"num_nodes": num}) for kind, item in sources.items()]
        results: Results = {}
        measure(target, methods, [item for item in half if item.prompts], [1], self._settings(0), results)
        return {kind: tallies for (kind, _), tallies in results.items()}

    def _answers(self, target: PreTrainedModel, data: Sequence[DataSet]) -> list[Recording]:
        asked = [Recording(np.array(prompt), np.empty(0, np.int64)) for item in data for prompt in item.prompts]
        return answered(asked, target, _ANSWERED, self.max_new_tokens, "answering, for a fixed tree")

    def _with_nodes(self, drafter: Drafter, num_nodes: int) -> Method:
        options: dict[str, Any] = {"num_nodes": num_nodes}
        if not isinstance(drafter.assistant, str):  # presets have no width
            options["width"] = self.width
        return Method(drafter.name, drafter.assistant, options=options)

    def _each(
        self,
        places: Sequence[Place],
        target: PreTrainedModel,
        methods: Sequence[Method],
        data: Sequence[DataSet],
        repetitions: int,
    ) -> Iterable[None]:
        """Place by place, with the methods that have not been measured there."""
        is_warm = False
        for place, item in zip(places, data):
            names = self.rows.missing(place, [method.name for method in methods])
            asked = [method for method in methods if method.name in names]
            if not asked:
                continue
            if not is_warm:
                first, is_warm = item._replace(name="warm-up", prompts=item.prompts[:1]), True
                measure(target, asked, [first], [1], Settings(_WARM_UP, False, 0), {})
            results: Results = {}
            own = item._replace(name=str(place))  # suffix trees know nothing of other places
            measure(target, asked, [own], [place.batch_size], self._settings(repetitions), results)
            for tallies in results.values():
                self.rows.add(place, tallies)
            yield

    def _settings(self, repetitions: int) -> Settings:
        return Settings(self.max_new_tokens, False, repetitions)


def mixed(data: Sequence[DataSet]) -> DataSet:
    """All prompts as one data set, the kinds taking turns."""
    turns = chain.from_iterable(zip_longest(*(item.prompts for item in data)))
    prompts = [prompt for prompt in turns if prompt is not None]
    return DataSet(MIXED, prompts, [np.empty(0, np.int64)] * len(prompts))


def _part(data: DataSet, half: int) -> DataSet:
    return data._replace(prompts=data.prompts[half::2], responses=data.responses[half::2])


def _joined(tallies: dict[str, Tally], others: dict[str, Tally]) -> dict[str, Tally]:
    """Of both halves of a kind's prompts."""
    return {
        name: Tally(
            statistics=tally.statistics + others[name].statistics,
            differences=tally.differences | {row - _APART: item for row, item in others[name].differences.items()},
        )
        for name, tally in tallies.items()
    }
