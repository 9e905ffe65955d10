"""Loads on the real engine and on the simulated one, and the calibration of the latter."""

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from ...candidates import DraftModelCandidates
from ...candidates.base import NoCandidates
from ...goodput import CostModel, DraftCost, LengthPolicy, StepRows
from ...goodput.papers.policies import BatchLookupTable
from ...goodput.papers.smartspec import StepGoodput
from ...goodput.report import LoggedPolicy
from ...serving.engine import Engine
from ...serving.outputs import EngineOutput
from ...simulator import LoadRequest, LoadResult, Served, SimulatedEngine, TableCandidates
from ...simulator.results import pooled
from ...target_model.cost.profiling import load_or_profile
from ..common.names import WITH_DRAFT_MODEL
from ..common.setup import Drafts, Setup
from .arguments import NONE
from .costs import Calibration
from .explain import Explanation
from .policies import Policies

LENGTHS = (0, 1, 2, 3, 5, 8)  # draft lengths of the calibration
_TABLE_BATCHES = 32  # the largest batch of the look-up table
_TABLE_LENGTH = 8
_SCALINGS = 2  # rounds in which the simulated machine is made as fast as the real one
_NUM_ALONE = 4  # prompts of the calibration that run alone


class Exploration(StepGoodput):
    """Policy of the calibration: it tries all lengths in turn, and learns costs and acceptance."""

    def __init__(self, cost: CostModel):
        super().__init__(cost, max(LENGTHS))
        self.num_steps = 0

    def shapes(self, rows: StepRows) -> Sequence[tuple[int, ...]]:
        self.num_steps += 1
        return [(1,) * LENGTHS[self.num_steps % len(LENGTHS)]] * len(rows)


# The real engine


def serve(
    setup: Setup, source: str, policy: LengthPolicy, requests: Sequence[LoadRequest], result: LoadResult
) -> Explanation:
    """
    Send requests at their arrival times and fill in the result when all are answered, or after an interrupt, with those
    that are. Return the engine's report.
    """
    engine = setup.new_engine(setup.new_source(source), policy)
    outputs: dict[str, EngineOutput] = {}
    with engine:
        start = time.perf_counter()
        try:
            for index, request in enumerate(requests):
                time.sleep(max(start + request.arrival - time.perf_counter(), 0))
                engine.add_request(request.prompt, request_id=str(index), max_new_tokens=request.max_new_tokens)
            outputs |= {output.request_id: output for output in engine}
            errors = [output.error for output in outputs.values() if output.error is not None]
            if errors:
                raise RuntimeError(f"{len(errors)} requests failed; the first one: {errors[0]}")
        except KeyboardInterrupt:
            while (output := engine.get_result(timeout=0)) is not None:
                outputs[output.request_id] = output
            raise
        finally:
            for name, output in outputs.items():
                request = requests[int(name)]
                first = output.first_token_time or output.lifespan[1]
                times = (first - start, output.lifespan[1] - start)
                result.served.append(Served(request.arrival, *times, len(output.generated_tokens)))
            result.served.sort()
            result.statistics += engine.statistics
    result.seconds_waited = sum(output.lifespan[0] - output.created_time for output in outputs.values())
    return Explanation(engine.report(), result.seconds_waited / max(len(requests), 1))


def warm_up(setup: Setup, source: str, policy: LengthPolicy) -> None:
    """Generate a few tokens with a whole engine."""
    engine = setup.new_engine(setup.new_source(source), policy)
    engine.generate(setup.prompts[:2], max_new_tokens=min(8, setup.max_new_tokens))


def calibrate(setup: Setup, source: str) -> Calibration:
    """
    Measure a source's costs on the real engine: some prompts one by one, then all at once. The answers, which do not
    depend on the policy, become the responses of the setup.
    """
    policy = Exploration(CostModel.from_dict(load_or_profile(setup.model).as_dict()))
    warm_up(setup, source, policy)
    with setup.new_engine(setup.new_source(source), policy) as engine:
        delays = [_seconds_to_queue(engine, prompt, setup) for prompt in setup.prompts[:_NUM_ALONE]]
    counts = engine.statistics
    together = setup.new_source(source)
    engine = setup.new_engine(together, policy)
    outputs = engine.generate(setup.prompts, max_new_tokens=setup.max_new_tokens)
    counts += engine.statistics
    if setup.responses is None:
        setup.responses = [np.array(output.generated_tokens, np.int64) for output in outputs]
    cost = DraftCost(is_autoregressive=together.is_autoregressive, width=together.width)
    (timer,) = policy.timers.values()
    per_call, per_row = timer.seconds(cost)
    draft = replace(cost, per_call=per_call, per_row=per_row)
    inside = _step_seconds(LoadResult(statistics=counts))
    if cost.is_autoregressive:  # its cost is that of levels, and of forwards; selecting drafts is neither's
        inside -= counts.seconds_select / max(counts.forwards, 1)
    besides = max(counts.seconds_total / max(counts.forwards, 1) - inside, 0.0)
    return Calibration(policy.cost, draft, besides, median(delays), together.default_num_nodes)


def _seconds_to_queue(engine: Engine, prompt: np.ndarray, setup: Setup) -> float:
    """Serve one request; return the seconds until it was in the queue."""
    start = time.perf_counter()
    output = engine.get_result(engine.add_request(prompt, max_new_tokens=setup.max_new_tokens))
    assert output is not None, "it was asked for"
    return output.created_time - start


# The simulated one


def new_requests(setup: Setup, times: np.ndarray, rng: np.random.Generator) -> list[LoadRequest]:
    """Return a request per arrival: all prompts in random order, as often as needed."""
    order = np.concatenate([rng.permutation(len(setup.prompts)) for _ in range(len(times) // len(setup.prompts) + 1)])
    responses = setup.responses or [np.zeros(0, np.int64)] * len(setup.prompts)
    return [
        LoadRequest(float(when), setup.prompts[index], setup.max_new_tokens, responses[index])
        for when, index in zip(times, order.tolist())
    ]


@torch.no_grad()
def with_draft_model(requests: Sequence[LoadRequest], draft: PreTrainedModel, known: Drafts) -> list[LoadRequest]:
    """
    Return the requests with a draft model's proposals. A chain is accepted as far as the draft model's arg max equals
    the true text, so one forward over each text gives all its chains. `known` keeps those of earlier calls.
    """
    result = []
    for item in requests:
        text = np.concatenate([item.prompt, item.response])
        name = text.tobytes()
        if name not in known:
            ids = torch.from_numpy(text[None]).to(draft.device)
            scores = draft(ids).logits[0, len(item.prompt) - 1 : -1].float().softmax(dim=-1)
            best = scores.max(dim=-1)
            ranks = (best.indices.cpu().numpy() != item.response).astype(np.int64)
            known[name] = ranks, best.values.cpu().numpy()[:, None]
        ranks, probs = known[name]
        result.append(replace(item, ranks=ranks, probs=probs))
    return result


PolicyMaker = Callable[[SimulatedEngine], LengthPolicy]


def _step_seconds(result: LoadResult) -> float:
    counts = result.statistics
    inside = counts.seconds_draft + counts.seconds_select + counts.seconds_forward + counts.seconds_verify
    return inside / max(counts.forwards, 1)


class Twin(NamedTuple):
    """The simulated twin of an engine, in virtual time."""

    setup: Setup
    source: str
    calibration: Calibration

    def scaled(self, factor: float) -> "Twin":
        """Return the twin on a machine that is slower by this factor."""
        return self._replace(calibration=self.calibration.scaled(factor))

    def engine(self, max_batch_size: int | None = None) -> SimulatedEngine:
        """
        Return a simulated engine with a new source, whose suffix trees hold the past. Learned drafters get none: only
        decoding without speculation is simulated for them.
        """
        setup, source, calibration = self
        drafter: TableCandidates | None = None
        if source in WITH_DRAFT_MODEL:
            assert setup.draft is not None, "asked for where there is a draft only"
            model = DraftModelCandidates(setup.draft)
            drafter = TableCandidates((1,) * model.most_nodes, is_autoregressive=True, heeds_prices=model.heeds_prices)
        return SimulatedEngine(
            calibration.cost,
            NoCandidates() if source in setup.learned else setup.new_source(source, drafter),
            [calibration.draft] if calibration.drafter is None else [calibration.draft, calibration.drafter],
            max_batch_size=max_batch_size or setup.max_batch_size,
            step_seconds=calibration.step_seconds,
            request_seconds=calibration.request_seconds,
            end_id=setup.end_id,
        )

    def run(
        self, requests: Sequence[LoadRequest], new_policy: PolicyMaker, max_batch_size: int | None = None
    ) -> LoadResult:
        """Serve a load; the requests must have their responses."""
        if self.source in WITH_DRAFT_MODEL:
            assert self.setup.draft is not None, "asked for where there is a draft only"
            requests = with_draft_model(requests, self.setup.draft, self.setup.drafts)
        engine = self.engine(max_batch_size)
        return engine.run(requests, new_policy(engine))

    def run_logged(self, requests: Sequence[LoadRequest], new_policy: PolicyMaker) -> tuple[LoadResult, Explanation]:
        """Serve a load; return the result and a report like the engine's."""
        logs: list[LoggedPolicy] = []

        def logged(engine: SimulatedEngine) -> LoggedPolicy:
            logs.append(LoggedPolicy(new_policy(engine), copy.deepcopy(self.calibration.cost)))
            return logs[0]

        result = self.run(requests, logged)
        return result, Explanation(logs[0].report(), result.seconds_waited / max(len(requests), 1))

    def slowness(
        self, requests: Sequence[LoadRequest], new_policy: PolicyMaker, rehearsals: Sequence[LoadResult]
    ) -> float:
        """
        Return the factor by which a mean step is slower than in the calibration, judged by the results of rehearsals:
        short loads (`requests`) on the real engine, right before and after the one that is simulated. Machines drift
        by more than simulations err.
        """
        real, factor = _step_seconds(pooled(rehearsals)), 1.0
        for _ in range(_SCALINGS):
            factor *= real / _step_seconds(self.scaled(factor).run(requests, new_policy))
        return factor

    def capacity(self) -> float:
        """Return the requests per second that it answers without speculation when none has to wait."""
        requests = self._requests(4 * self.setup.max_batch_size)
        return len(requests) / self.run(requests, partial(Policies(self.calibration.cost).new, NONE)).seconds

    def lookup_table(self) -> BatchLookupTable:
        """
        Return Su et al.'s table: the seconds per token of full batches of every size with every length. The grid
        search runs in virtual time, which takes seconds where the engine would take minutes.
        """

        def seconds_per_token(batch_size: int, length: int) -> float:
            if length > self.calibration.max_nodes:
                return np.inf
            requests = self._requests(2 * batch_size)
            return 1 / self.run(requests, lambda _: BatchLookupTable({1: length}), batch_size).goodput

        size = min(_TABLE_BATCHES, self.setup.max_batch_size)
        return BatchLookupTable.profiled(seconds_per_token, size, _TABLE_LENGTH)

    def _requests(self, number: int) -> list[LoadRequest]:
        """Return requests that arrive at once."""
        return new_requests(self.setup, np.zeros(number), np.random.default_rng(self.setup.seed))
