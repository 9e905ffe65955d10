"""Measurements of drafters on each kind of text: a row for each kind, batch size, number of nodes and drafter."""

import heapq
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, zip_longest
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from hf_smartspec.candidates import BlockCandidates, BlockDrafter, MedusaCandidates, MedusaHeads
from hf_smartspec.candidates.heads.blocks.scores import Lattice
from hf_smartspec.candidates.heads.hidden_states import KnownStates
from hf_smartspec.candidates.heads.learned import FeatureDrafter
from hf_smartspec.commands.common.drafters import Drafter
from hf_smartspec.commands.common.recordings import DataSet, Recording, answered
from hf_smartspec.commands.speed.loop import PLAIN, Method, Results, Settings, Tally, measure
from hf_smartspec.commands.speed.report import num_different
from hf_smartspec.goodput import Calibrator
from hf_smartspec.training.medusa import last_hidden_states

from ...kit.session import Case
from ...kit.tables import Row

NONE, MIXED = "none", "mixed"
CALIBRATED, RAW, FIXED = "calibrated trees", "trees by raw probabilities", "the best fixed tree"
CHAIN, TREE, GOODPUT = "chain", "tree", "goodput decides"
SHORT, CUT = "chain of a short block", "chain of a whole block"
_WARM_UP = 8  # tokens
_APART = 10**6  # between the numbers of rows of the two halves


def _rows(place: Row, tallies: dict[str, Tally]) -> list[Row]:
    """Return a row for each drafter at this place."""
    return [place | {"drafter": name} | _figures(tally, tallies[PLAIN]) for name, tally in tallies.items()]


def _figures(tally: Tally, plain: Tally) -> Row:
    row: Row = {"statistics": tally.statistics.as_dict()}
    row |= {
        "num_different": num_different(tally),
        "num_tied": sum(item.is_tie for item in tally.differences.values()),
    }
    if tally.calls:
        seconds = [call.decode_seconds_per_token for call in tally.calls]
        row |= {"speedup": tally.speedup(plain), "decode_speedup": tally.decode_speedup(plain)}
        row |= {"tokens_per_second": tally.tokens_per_second}
        row |= {"decode_seconds_per_token": float(np.nanmedian(seconds))}
    return row


class DrafterBench:
    """
    Args:
        max_new_tokens, num_nodes (sequence), width, repetitions: As the command's arguments.
    """

    def __init__(self, max_new_tokens: int, num_nodes: Sequence[int], width: int, repetitions: int):
        self.max_new_tokens, self.num_nodes = max_new_tokens, num_nodes
        self.width, self.repetitions = width, repetitions
        self._warm: set[str] = set()

    def steps(self, target: PreTrainedModel, drafters: Sequence[Drafter], data: Sequence[DataSet]) -> Iterator[Case]:
        """
        Yield one prompt at a time with a fixed number of nodes at every step; of its times, only those of drafting
        count.
        """
        for num in self.num_nodes:
            methods = [Method(NONE, NONE), *(self._with_nodes(item, num) for item in drafters)]
            for item in data:
                place = {"kind": item.name, "batch_size": 1, "nodes": num}
                yield Case(f"{item.name}, {num} nodes", partial(self._measured, target, methods, item, place, 0))

    def speed(
        self, target: PreTrainedModel, drafters: Sequence[Drafter], data: Sequence[DataSet], batch_sizes: Sequence[int]
    ) -> Iterator[Case]:
        """
        Yield batches in which goodput decides how many nodes are drafted. Larger batches have rows of all kinds, in
        turn.
        """
        methods = [Method(item.name, item.assistant) for item in drafters]
        for size in batch_sizes:
            for item in data if size == 1 else [mixed(data)]:
                place = {"kind": item.name, "batch_size": min(size, len(item.prompts)), "nodes": 0}
                run = partial(self._measured, target, methods, item, place, self.repetitions)
                yield Case(f"{item.name}, batch {size}", run)

    def blocks(
        self,
        target: PreTrainedModel,
        drafters: Sequence[Drafter],
        data: Sequence[DataSet],
        batch_sizes: Sequence[int],
        levels: Sequence[int],
    ) -> Iterator[Case]:
        """
        Yield batches, larger ones with rows of all kinds in turn, in which block drafters draft whole blocks, as chains
        and as trees, and half as long chains, from short blocks and from whole ones; and drafters that grow level by
        level draft so many levels; and both as goodput decides.
        """
        blocks = [item for item in drafters if isinstance(item.assistant, BlockDrafter)]
        growing = [item for item in drafters if isinstance(item.assistant, PreTrainedModel | FeatureDrafter)]
        methods, shapes = [Method(NONE, NONE)], {}
        for item in [*blocks, *growing]:
            for form, num_levels, options in self._shapes(item, levels):
                about = f" of {num_levels} levels, {options['num_nodes']} nodes" if options else ""
                assistant = _WholeBlocks(item.assistant, width=1) if form == CUT else item.assistant
                methods.append(Method(f"{item.name}, {form}{about}", assistant, options=options))
                shapes[methods[-1].name] = {"source": item.name, "form": form, "is_block": item in blocks}
        for size in batch_sizes:
            for own in data if size == 1 else [mixed(data)]:
                place = {"kind": own.name, "batch_size": min(size, len(own.prompts)), "nodes": max(self.num_nodes)}
                yield Case(f"{own.name}, batch {size}", partial(self._with_shapes, target, methods, own, place, shapes))

    def _shapes(self, drafter: Drafter, levels: Sequence[int]) -> Iterator[tuple[str, int, dict[str, Any]]]:
        """
        Yield forms of drafts, with their numbers of levels and their options. All trees have the same number of nodes.
        """
        most = max(self.num_nodes)
        if isinstance(drafter.assistant, BlockDrafter):
            num = drafter.assistant.num_depths
            yield CHAIN, num, {"num_nodes": num, "width": 1}
            yield TREE, num, {"num_nodes": most}
            if half := num // 2:
                yield SHORT, half, {"num_nodes": half, "width": 1}
                yield CUT, half, {"num_nodes": half}
        else:
            for num in levels:
                yield CHAIN, num, {"num_nodes": num, "width": 1}
                width = -(-most // max(num - 1, 1))
                if num > 1 and width > 1 and -(-most // width) + 1 == num:  # as `GrowingCandidates` grows trees
                    yield TREE, num, {"num_nodes": most, "width": width}
        yield GOODPUT, 0, {}

    def _with_shapes(
        self, target: PreTrainedModel, methods: Sequence[Method], data: DataSet, place: Row, shapes: dict[str, Row]
    ) -> Row:
        rows = self._measured(target, methods, data, place, self.repetitions)["rows"]
        return {"rows": [row | shapes.get(row["drafter"], {}) for row in rows]}

    def trees(self, target: PreTrainedModel, heads: dict[str, MedusaHeads], data: Sequence[DataSet]) -> Iterator[Case]:
        """
        Yield comparisons of Medusa's trees: each half of the prompts is decoded with the fixed tree that is best for
        the answers to the other half, and with trees that are chosen anew at every step.
        """
        for name, own in heads.items():
            yield Case(name, partial(self._both_halves, target, name, own, data))

    def _both_halves(self, target: PreTrainedModel, name: str, heads: MedusaHeads, data: Sequence[DataSet]) -> Row:
        halves = [[_part(item, half) for item in data] for half in (0, 1)]
        learning = {CALIBRATED: MedusaCandidates(heads, calibrator=Calibrator()), RAW: MedusaCandidates(heads)}
        found: dict[str, dict[str, Tally]] = {}
        for half, other in (halves, halves[::-1]):
            for kind, tallies in self._half(target, name, heads, learning, half, other).items():
                found[kind] = _joined(found[kind], tallies) if kind in found else tallies
        place = {"batch_size": 1, "nodes": max(self.num_nodes)}
        return {"rows": [row for kind, tallies in found.items() for row in _rows({"kind": kind} | place, tallies)]}

    def _half(
        self,
        target: PreTrainedModel,
        name: str,
        heads: MedusaHeads,
        learning: dict[str, MedusaCandidates],
        half: Sequence[DataSet],
        other: Sequence[DataSet],
    ) -> dict[str, dict[str, Tally]]:
        """Return the tallies of all kinds of trees on half of the prompts, by kind of text."""
        num = max(self.num_nodes)
        tree = best_fixed_tree(accuracies(heads, target, self._answers(target, other)), num)
        sources = learning | {FIXED: MedusaCandidates(heads, tree=tree)}
        methods = [Method(f"{name}, {kind}", item, options={"num_nodes": num}) for kind, item in sources.items()]
        results: Results = {}
        measure(target, methods, [item for item in half if item.prompts], [1], self._settings(0), results)
        return {kind: tallies for (kind, _), tallies in results.items()}

    def _answers(self, target: PreTrainedModel, data: Sequence[DataSet]) -> list[Recording]:
        asked = [Recording(np.array(prompt), np.empty(0, np.int64)) for item in data for prompt in item.prompts]
        return answered(asked, target, self.max_new_tokens, "answering, for a fixed tree")

    def _with_nodes(self, drafter: Drafter, num_nodes: int) -> Method:
        options: dict[str, Any] = {"num_nodes": num_nodes}
        if not isinstance(drafter.assistant, str):  # presets have no width
            options["width"] = self.width
        return Method(drafter.name, drafter.assistant, options=options)

    def _measured(
        self, target: PreTrainedModel, methods: Sequence[Method], data: DataSet, place: Row, repetitions: int
    ) -> Row:
        """Return the rows of all methods, which take turns; the first measurement of the same methods warms up."""
        if (key := repr([(method.name, method.options) for method in methods])) not in self._warm:
            first = data._replace(name="warm-up", prompts=data.prompts[:1])
            measure(target, methods, [first], [1], Settings(_WARM_UP, False, 0), {})
            self._warm.add(key)
        results: Results = {}
        own = data._replace(name=str(place))  # suffix trees know nothing of other places
        measure(target, methods, [own], [place["batch_size"]], self._settings(repetitions), results)
        return {"rows": [row for tallies in results.values() for row in _rows(place, tallies)]}

    def _settings(self, repetitions: int) -> Settings:
        return Settings(self.max_new_tokens, False, repetitions)


class _WholeBlocks(BlockCandidates):
    """Has blocks of all slots, whatever the number of nodes, as in training."""

    def _lattice(self, states: Sequence[KnownStates], most_depths: int, width: int) -> Lattice:
        return super()._lattice(states, self.heads.num_depths, width)


def mixed(data: Sequence[DataSet]) -> DataSet:
    """Return all prompts as one data set, the kinds in turn."""
    turns = chain.from_iterable(zip_longest(*(item.prompts for item in data)))
    prompts = [prompt for prompt in turns if prompt is not None]
    return DataSet(MIXED, prompts, [np.empty(0, np.int64)] * len(prompts))


def _part(data: DataSet, half: int) -> DataSet:
    return data._replace(prompts=data.prompts[half::2], responses=data.responses[half::2])


def _joined(tallies: dict[str, Tally], others: dict[str, Tally]) -> dict[str, Tally]:
    """Return the tallies of both halves of a kind's prompts together."""
    return {
        name: Tally(
            statistics=tally.statistics + others[name].statistics,
            differences=tally.differences | {row - _APART: item for row, item in others[name].differences.items()},
        )
        for name, tally in tallies.items()
    }


# The best fixed tree of Medusa heads, as the paper chooses it (Cai et al., arXiv 2401.10774, section 2.3.3).

_WIDTH = 10  # candidates of each head that may be nodes, as in Medusa's published trees

Path = tuple[int, ...]


@torch.no_grad()
def accuracies(heads: MedusaHeads, target: PreTrainedModel, texts: Sequence[Recording]) -> np.ndarray:
    """Return `[K, w]`: how often the i-th candidate of head k was the next token, in responses of the target."""
    hits, num = np.zeros((heads.num_heads, _WIDTH)), np.zeros(heads.num_heads)
    for text in texts:
        ids = torch.from_numpy(np.concatenate([text.prompt, text.response]))
        states = last_hidden_states(target, ids[None].to(target.device))[0]
        tokens, _ = heads.best(states, _WIDTH)
        first = len(text.prompt) - 1  # which the response's first token is picked by
        for head in range(heads.num_heads):
            later = ids[first + head + 2 :].to(tokens.device)
            found = tokens[first : first + len(later), head] == later[:, None]
            hits[head] += found.sum(0).cpu().numpy()
            num[head] += len(later)
    shares: np.ndarray = hits / np.maximum(num, 1)[:, None]
    return shares


def best_fixed_tree(shares: np.ndarray, num_nodes: int) -> list[Path]:
    """
    Return the paths of the nodes of highest accuracy, parents first; a path's accuracy is the product over its heads.
    """
    num_heads, width = shares.shape
    waiting: list[tuple[float, Path]] = [(-float(shares[0, rank]), (rank,)) for rank in range(width)]
    heapq.heapify(waiting)
    tree: list[Path] = []
    while waiting and len(tree) < num_nodes:
        value, path = heapq.heappop(waiting)
        tree.append(path)
        if len(path) < num_heads:
            for rank in range(width):
                heapq.heappush(waiting, (value * float(shares[len(path), rank]), (*path, rank)))
    return tree
