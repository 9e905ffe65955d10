"""The search of `smartspec tune`: coordinate descent whose steps are races over replayed responses."""

import json
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedModel

from ...candidates import DraftModelCandidates
from ...drafts.price import LevelPrice
from ...drafts.tree import DraftTree
from ..common.recordings import Recording
from ..replay.curves import geometric_mean
from ..replay.loop import Replayer, Tally
from .arguments import Costs
from .space import Choice, Parameter, build, changed

_RUNGS = (0.25, 0.5, 1.0)  # parts of the training requests after which the worse half of a race drops out
_MAX_ROUNDS = 3
_LEAST_GAIN = 1.001  # less is noise


class Requests(NamedTuple):
    """One data set, whose first requests are trained on."""

    name: str
    recordings: list[Recording]
    num_training: int


def speed(counts: np.ndarray, costs: Costs) -> float:
    """
    Return tokens per cost, 1 without drafts: (1 + accepted) / (1 + node cost * drafted), over all steps of `counts`
    (`[n, 5]`, as `Trial.counts`).
    """
    tokens, steps, drafted, _, modelled = counts.sum(axis=0)
    return float(tokens / max(steps + costs.node * drafted + costs.drafter * modelled, 1e-9))


class _CountedDrafter(DraftModelCandidates):
    """A draft model that counts the tokens it drafts, each of which costs a forward."""

    num_drafted = 0

    def propose(
        self, request_ids: Sequence, max_nodes: Sequence[int], price: LevelPrice | None = None
    ) -> list[DraftTree]:
        trees = super().propose(request_ids, max_nodes, price)
        self.num_drafted += sum(map(len, trees))
        return trees


class Trial:
    """
    One choice on its way through the requests of all data sets.

    Attributes:
        counts (list of `np.ndarray` of shape `[requests, 5]`): Per data set and request: tokens, steps, drafted and
            accepted tokens, and tokens that the draft model drafted.
    """

    def __init__(self, choice: Choice, data: Sequence[Requests], draft: PreTrainedModel | None):
        self.choice, self.data = choice, data
        self.counts = [np.zeros((len(item.recordings), 5), np.int64) for item in data]
        self.num_done = [0] * len(data)
        self._runs = [self._run(item.recordings, counts, draft) for item, counts in zip(data, self.counts)]

    def _run(
        self, recordings: list[Recording], counts: np.ndarray, draft: PreTrainedModel | None
    ) -> Generator[None, None, None]:
        drafter = None if draft is None else _CountedDrafter(draft)
        # Built here and not at the first request, so that errors are raised before the race.
        replayer, tally = Replayer(build(self.choice, drafter)), Tally.of(len(recordings))
        run = replayer.run(recordings, tally)

        def counted() -> Generator[None, None, None]:
            before = 0
            for index, _ in enumerate(run):
                now = 0 if drafter is None else drafter.num_drafted
                counts[index] = *tally.requests[index], now - before
                before = now
                yield

        return counted()

    def advance(self, numbers: Sequence[int], progress: Callable[[int], object]) -> None:
        """Replay until `numbers` requests of each data set are done."""
        for index, (run, number) in enumerate(zip(self._runs, numbers)):
            while self.num_done[index] < number:
                next(run)
                self.num_done[index] += 1
                progress(1)

    def value(self, numbers: Sequence[int], costs: Costs) -> float:
        """Return the geometric mean of the speeds on the first `numbers` requests of each data set."""
        return geometric_mean([speed(counts[:number], costs) for counts, number in zip(self.counts, numbers)])


class Search:
    """
    Coordinate descent: parameter by parameter, the values race, and the fastest is kept; again from the first, until no
    parameter changes.

    Args:
        choice (`Choice`): The choice to begin with.
        data (sequence of `Requests`): The data sets, of which only the training requests are used.
        draft (`PreTrainedModel`, *optional*): A draft model that drafts where the sources promise little.
        progress (callable): Gets the numbers of requests that were replayed or skipped.

    Attributes:
        best (`Trial`): The best choice so far.
    """

    def __init__(
        self,
        choice: Choice,
        data: Sequence[Requests],
        costs: Costs,
        draft: PreTrainedModel | None = None,
        progress: Callable[[int], object] = lambda number: None,
    ):
        self.data, self.costs, self.draft, self.progress = data, costs, draft, progress
        self.training = [item.num_training for item in data]
        self._tried = {_key(choice)}
        self.best = Trial(choice, data, draft)
        self.best.advance(self.training, progress)

    @property
    def value(self) -> float:
        """The speed of the best choice on the training requests."""
        return self.best.value(self.training, self.costs)

    def run(self, parameters: Sequence[Parameter]) -> Iterator[Parameter]:
        """Run the races; yield the parameter of each after its end."""
        since_change = 0
        for parameter in list(parameters) * _MAX_ROUNDS:
            if since_change == len(parameters):
                return
            before = self.best
            self._race(parameter)
            since_change = since_change + 1 if self.best is before else 1
            yield parameter

    def _race(self, parameter: Parameter) -> None:
        started = trials = self._trials(parameter)
        for rung in _RUNGS:
            numbers = [math.ceil(rung * number) for number in self.training]
            for trial in trials:
                trial.advance(numbers, self.progress)
            trials = sorted(trials, key=lambda trial: -trial.value(numbers, self.costs))
            if rung < 1:
                trials = trials[: math.ceil(len(trials) / 2)]
        if trials and trials[0].value(self.training, self.costs) > self.value * _LEAST_GAIN:
            self.best = trials[0]
        self.progress(_num_others(parameter) * sum(self.training) - sum(sum(trial.num_done) for trial in started))

    def _trials(self, parameter: Parameter) -> list[Trial]:
        """Return trials of the values that fit the best choice and were not tried with it yet."""
        trials = []
        for value in parameter.values:
            choice = changed(self.best.choice, parameter, value)
            if _key(choice) in self._tried:
                continue
            self._tried.add(_key(choice))
            with suppress(ValueError):
                trials.append(Trial(choice, self.data, self.draft))
        return trials


def num_requests(data: Sequence[Requests], parameters: Sequence[Parameter]) -> int:
    """Return the number of requests that a search replays at most."""
    return (1 + _MAX_ROUNDS * sum(map(_num_others, parameters))) * sum(item.num_training for item in data)


def _num_others(parameter: Parameter) -> int:
    return len(parameter.values) - 1


def _key(choice: Choice) -> str:
    return json.dumps(choice, sort_keys=True)
