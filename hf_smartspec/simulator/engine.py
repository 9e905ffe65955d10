"""The engine in virtual time: `serving.runner.EngineRunner` without thread and model."""

import copy
import math
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence

import numpy as np
import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria

from ..candidates.base import TreeCandidateGenerator, most_nodes_of, refuse_needs
from ..decoding.batch import DecodingBatch
from ..decoding.call import DRAFT_ROOM, DecodingCall, ModelLimits, Request
from ..decoding.loop import DecodingLoop
from ..decoding.policy_rows import most_running
from ..decoding.verify import coupled_picks
from ..goodput.cost import CostModel
from ..goodput.draft_cost import DraftCost
from ..goodput.policy import LengthPolicy
from ..goodput.prefill_gate import PrefillGate
from ..sampling.processors import TokenPicker
from ..serving.memory.kv_memory import EngineMemory
from ..serving.memory.prefix_cache import PrefixRows
from ..serving.scheduler import Scheduler
from .clock import EventClock
from .forward import SimulatedForward
from .requests import LoadRequest
from .results import LoadResult, Served
from .sources import TimedCandidates, timed_stages

_LIMITS = ModelLimits(vocab_size=2**62, num_positions=None)  # random texts may have any token ids


class SimulatedEngine:
    """
    Engine that serves loads in virtual time, with the decoding loop, scheduler, prefix reuse, candidate sources and
    length policies of `Engine`. Only the target's forwards and the time of drafting are replaced, by an event clock
    (SmartSpec, section 7.2).

    Simulations leave out the time to copy memory that grows, and contention between threads.

    Args:
        cost (`CostModel`): Cost of the target's forwards, with its corrections; it is copied.
        source (`TreeCandidateGenerator`): The source that drafts; what it learns stays from one `run` to the next.
        draft_cost (`DraftCost` or sequence of `DraftCost`): Cost of drafting, of each stage.
        max_batch_size (`int`): Requests that run at once.
        max_tokens (`int`): Tokens of key/value memory.
        max_prefill_tokens (`int`): Prompt tokens per step.
        step_seconds (`float`): Further seconds of every step.
        request_seconds (`float`): Seconds from a request's arrival until it is queued.
        max_nodes (`int`, *optional*): Draft nodes per row; the source's default if omitted.
        end_id (`int`): The end-of-sequence token.

    Raises:
        ValueError: for a source that needs hidden states or scores, since there is no target to compute them.
    """

    def __init__(
        self,
        cost: CostModel,
        source: TreeCandidateGenerator,
        draft_cost: DraftCost | Sequence[DraftCost] | None = None,
        max_batch_size: int = 32,
        max_tokens: int = 2**20,
        max_prefill_tokens: int = 512,
        step_seconds: float = 0.0,
        request_seconds: float = 0.0,
        max_nodes: int | None = None,
        end_id: int = 0,
    ):
        refuse_needs(source, "a simulation")
        self.clock = EventClock()
        self.forward = SimulatedForward(copy.deepcopy(cost), self.clock, end_id)
        costs = [draft_cost] if isinstance(draft_cost, DraftCost) else draft_cost or [DraftCost()]
        self.source = timed_stages(source, self.clock, costs)
        self.max_nodes = most_nodes_of(source) if max_nodes is None else max_nodes
        self.max_prefill_tokens = max_prefill_tokens
        self.step_seconds, self.request_seconds = step_seconds, request_seconds
        self.memory = _SimulatedMemory(self.forward, Scheduler(max_batch_size, max_tokens))
        self.new_gate: Callable[[], PrefillGate] = PrefillGate  # of every run, for drafters by the level
        self._criteria = StoppingCriteriaList([EosTokenCriteria([end_id])])

    def continuation(self, request_id: Hashable) -> np.ndarray:
        """Return the next tokens of a running request, int64 `[n]`, for the `Oracle`."""
        return self.first_stage.continuation(request_id)

    @property
    def first_stage(self) -> TimedCandidates:
        first = self.source.stages[0]
        assert isinstance(first, TimedCandidates), "every stage is timed"
        return first

    def run(
        self,
        requests: Sequence[LoadRequest],
        policy: LengthPolicy,
        on_served: Callable[[LoadRequest, Sequence[int]], object] | None = None,
    ) -> LoadResult:
        """
        Reset the clock, and serve requests at their arrival times until the last one is answered.

        Args:
            policy (`LengthPolicy`): Decides how much to speculate. It must not hold this engine's own `CostModel`.
            on_served (`Callable`, *optional*): Called with each request and its tokens when it ends.

        Raises:
            ValueError: before anything runs, for a request that can never fit into memory.
        """
        run = self.begin(requests, policy)
        while run.step(on_served):
            pass
        return run.result(requests)

    def begin(self, requests: Sequence[LoadRequest], policy: LengthPolicy) -> "Run":
        """Begin a load as `run` does, and return it for running step by step."""
        for request in requests:
            self.memory.scheduler.check(self._num_tokens(request))
        self.clock.now, self.forward.num_batched = 0.0, 0
        loop = DecodingLoop(policy, _LIMITS, self.max_prefill_tokens, release=self.memory.release, clock=self.clock)
        loop.drafting.sources.gates = defaultdict(self.new_gate)
        return Run(self, loop, sorted(requests, key=lambda item: item.arrival))

    def _num_tokens(self, request: LoadRequest) -> int:
        return len(request.prompt) + request.max_new_tokens + min(self.max_nodes, DRAFT_ROOM)

    def new_call(self, item: LoadRequest) -> DecodingCall:
        """Return the call that `prepare_call` and `decoding_call` make of a greedy request."""
        prompt = torch.from_numpy(item.prompt)
        request = Request(item, 0, prompt, torch.ones_like(prompt, dtype=torch.bool), item.max_new_tokens)
        batch = DecodingBatch([request], self._criteria, None)
        picker = TokenPicker(LogitsProcessorList(), 1, len(item.prompt))
        assignment = {"namespace": item.namespace} if item.namespace else {}
        return DecodingCall(
            self.forward, batch, picker, coupled_picks, self.source, self.max_nodes, assignment=assignment
        )


class Run:
    """A load that an engine serves, step by step."""

    def __init__(self, engine: SimulatedEngine, loop: DecodingLoop, requests: Sequence[LoadRequest]):
        self.engine, self.loop = engine, loop
        self.clock, self.memory = engine.clock, engine.memory
        self.coming = deque(requests)
        self.first_tokens: dict[DecodingCall, float] = {}
        self.unanswered: list[DecodingCall] = []  # running calls that have no token yet
        self.served: dict[LoadRequest, Served] = {}
        self.seconds_waited = 0.0

    @property
    def next_time(self) -> float:
        """Virtual time of the next step; infinite if there is none."""
        if len(self.memory.scheduler):
            return self.clock.now
        return max(self.clock.now, self._queued(self.coming[0])) if self.coming else math.inf

    def result(self, requests: Sequence[LoadRequest] | None = None) -> LoadResult:
        """Return the result so far, with served requests in the order of `requests`, or else in that of their ends."""
        served = [self.served[request] for request in requests or self.served]
        return LoadResult(served, self.loop.statistics, self.engine.forward.num_batched, self.seconds_waited)

    def step(self, on_served: Callable[[LoadRequest, Sequence[int]], object] | None = None) -> bool:
        """Run the next step of the loop and return True; return False if there is none."""
        if math.isinf(self.next_time):
            return False
        self.clock.jump(self.next_time)
        self._admit()
        ended = self.loop.step()
        self.clock.advance(self.engine.step_seconds)
        answered = [call for call in self.unanswered if call.requests[0].tokens]
        self.first_tokens |= dict.fromkeys(answered, self.clock.now)
        self.unanswered = [call for call in self.unanswered if not call.requests[0].tokens]
        for call in ended:
            self._finish(call, on_served)
        return True

    def _queued(self, item: LoadRequest) -> float:
        return item.arrival + self.engine.request_seconds

    def _admit(self) -> None:
        scheduler = self.memory.scheduler
        while self.coming and self._queued(self.coming[0]) <= self.clock.now:
            coming = self.engine.new_call(self.coming.popleft())
            scheduler.add(coming, self.memory.size_of(coming), coming.namespace)
        most = math.inf
        if self.loop.policy.chooses_batches:
            waiting, num_fitting = scheduler.queue()
            requests = [item.requests[0] for item in waiting]
            most = most_running(self.loop.policy, self.loop.running, requests, num_fitting)
        while len(scheduler.running) < most and (call := scheduler.next()) is not None:
            request = call.requests[0]
            self.seconds_waited += self.clock.now - self._queued(_item(request))
            self.memory.place(request, self.loop.running)
            self.engine.forward.set_text(request.cache_row, _text(request))
            self.loop.add(call)
            self.memory.finish_placement(request)
            self.unanswered.append(call)
        self.loop.num_waiting = scheduler.num_waiting

    def _finish(self, call: DecodingCall, on_served: Callable[[LoadRequest, Sequence[int]], object] | None) -> None:
        self.memory.scheduler.remove(call)
        request = call.requests[0]
        item = _item(request)
        self.served[item] = Served(item.arrival, self.first_tokens.pop(call), self.clock.now, request.num_valid)
        if on_served is not None:
            on_served(item, request.tokens[: request.num_valid])


def _item(request: Request) -> LoadRequest:
    """Return the `LoadRequest`, which is the id of the decoding loop's request."""
    assert isinstance(request.request_id, LoadRequest), "ids of simulated requests are LoadRequests"
    return request.request_id


def _text(request: Request) -> np.ndarray:
    return np.concatenate([_item(request).prompt, _item(request).response])


class _SimulatedMemory(EngineMemory):
    """An engine's memory without keys and values; it decides about admission and prefix reuse as for a model."""

    scheduler: Scheduler[DecodingCall]  # type: ignore[assignment]

    def __init__(self, forward: SimulatedForward, scheduler: Scheduler[DecodingCall]):
        self.forward, self.scheduler = forward, scheduler  # type: ignore[assignment]
        self.prefixes = PrefixRows()
        self.num_reused = 0
        self._clear()
