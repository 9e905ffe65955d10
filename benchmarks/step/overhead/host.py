"""Host time of a step: everything but the target's forward, which is a stub."""

import copy
import sys
import time
from collections.abc import Hashable, Sequence
from functools import cache, partial
from statistics import median
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import LlamaForCausalLM, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria

from hf_smartspec.candidates.base import NoCandidates, TreeCandidateGenerator, most_nodes_of
from hf_smartspec.candidates.text.suffix.source import SuffixTreeCandidates
from hf_smartspec.decoding.batch import DecodingBatch
from hf_smartspec.decoding.call import DecodingCall, ModelLimits, Request
from hf_smartspec.decoding.loop import DecodingLoop
from hf_smartspec.decoding.verify import coupled_picks
from hf_smartspec.goodput import CostModel, GoodputAuction, LengthPolicy, NoSpeculation
from hf_smartspec.sampling.processors import TokenPicker
from hf_smartspec.simulator.clock import EventClock
from hf_smartspec.target_model.written import written_decoder

from ...kit.claims import Claim
from ...kit.session import Case, Section
from ...kit.tables import Column, Row, Rows
from . import stubs
from .stubs import VOCAB_SIZE, DrawnTrees, StubForward, llama_config, repetitive_text

ROWS = (1, 16, 64, 256)
CONTEXTS = (1000, 2000)  # of the rows, tokens
DRAFTS = ("none", "suffix", "trees of 64")
LIMITS = {  # milliseconds that a step may take
    ("none", 1): 0.3,
    ("none", 256): 3.0,
    ("suffix", 1): 0.3,
    ("suffix", 256): 5.0,
    ("trees of 64", 256): 12.0,
}
WARMUP = 30  # steps, in which the auction learns
_COUNTED = 5  # steps in which calls are counted
_TREE = 64  # nodes
_WATCHED_LAYERS = 24

# What a model of 7 billion parameters might cost on a GPU: tokens cost little up to some hundreds.
_GPU = CostModel(alpha=4e-8, gamma=0.0, delta=0.0, knots=(1, 128, 256, 2048), curve=(0.005, 0.0054, 0.008, 0.06))
_FREE = CostModel(alpha=0.0, gamma=0.0, delta=0.01)  # where all nodes of a tree are verified


class Setting(NamedTuple):
    """A running loop, and the seconds of its steps that are no host time."""

    loop: DecodingLoop
    forward: StubForward
    source: TreeCandidateGenerator

    @property
    def seconds_apart(self) -> float:
        return self.forward.seconds + getattr(self.source, "seconds", 0.0)


def section(num_steps: int, num_rows: Sequence[int] = ROWS) -> Section:
    """
    Return a step's milliseconds of one thread, its calls of Python functions and its nodes, by kind of drafts and
    number of rows. Other programs' load shows in the median, and hardly in the least.
    """
    settings = [(drafts, num) for drafts in DRAFTS for num in num_rows]
    cases = [Case(f"{drafts}, {num}", partial(_alone, drafts, num, num_steps)) for drafts, num in settings]
    title = (
        f"Host time of a step: no forward, one thread, vocabulary {VOCAB_SIZE}, contexts {CONTEXTS[0]}-{CONTEXTS[1]}"
    )
    return Section("host", lambda: cases, _COLUMNS, title, "drafts, rows", claims=_claims)


_COLUMNS = (
    Column("nodes per row", "nodes_per_row", "{:.1f}"),
    Column("calls", "python_calls", "{:.0f}"),
    Column("ms", "milliseconds", "{:.2f}"),
    Column("least ms", "least_milliseconds", "{:.2f}"),
    Column("limit", "limit", "{:g}"),
    Column("", lambda row, _: {None: "", True: "met", False: "missed"}[row["is_met"]]),
)


def _claims(rows: Rows) -> list[Claim]:
    missed = [f"{row['drafts']} at {row['rows']}" for row in rows.values() if row["is_met"] is False]
    return [Claim("every limit is met", not missed, f"missed: {', '.join(missed)}" if missed else "")]


def _alone(drafts: str, num_rows: int, num_steps: int) -> Row:
    """Measure with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measured(drafts, num_rows, num_steps)
    finally:
        torch.set_num_threads(threads)


@torch.no_grad()
def _measured(drafts: str, num_rows: int, num_steps: int) -> dict[str, Any]:
    setting = make_setting(drafts, num_rows, WARMUP + num_steps + _COUNTED)
    for _ in range(WARMUP):
        setting.loop.step()
    before, times = setting.loop.statistics.drafted_tokens, []
    for _ in range(num_steps):
        start, apart = time.perf_counter(), setting.seconds_apart
        setting.loop.step()
        times.append(time.perf_counter() - start - (setting.seconds_apart - apart))
    nodes = setting.loop.statistics.drafted_tokens - before
    limit, milliseconds = LIMITS.get((drafts, num_rows)), median(times) * 1e3
    return {
        "drafts": drafts,
        "rows": num_rows,
        "nodes_per_row": nodes / (num_steps * num_rows),
        "python_calls": _num_calls(setting),
        "milliseconds": milliseconds,
        "least_milliseconds": min(times) * 1e3,
        "limit": limit,
        "is_met": None if limit is None else milliseconds <= limit,
    }


def _num_calls(setting: Setting) -> float:
    """Return the calls of Python functions in a step, without those of the stubs."""
    num, depth = 0, 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal num, depth
        is_stub = frame.f_code.co_filename == stubs.__file__
        if event == "call":
            depth += is_stub
            num += not depth
        elif event == "return":
            depth -= is_stub

    sys.setprofile(count)
    try:
        for _ in range(_COUNTED):
            setting.loop.step()
    finally:
        sys.setprofile(None)
    return num / _COUNTED


def make_setting(drafts: str, num_rows: int, num_steps: int, seed: int = 0) -> Setting:
    """
    Return rows in the middle of texts that are long enough for `num_steps`; every row is a call of its own, as in an
    engine.
    """
    rng, clock = np.random.default_rng(seed), EventClock()
    cost = _FREE if drafts.startswith("trees") else _GPU
    forward = StubForward(num_rows, cost, clock, partial(_look, _watched()))
    lengths = rng.integers(*CONTEXTS, num_rows).tolist()
    texts = [repetitive_text(length + (num_steps + 2) * (_TREE + 1), rng) for length in lengths]
    answers: dict[Hashable, np.ndarray] = {row: text[length:] for row, (text, length) in enumerate(zip(texts, lengths))}
    source, policy = _source(drafts, answers), _policy(drafts, cost)
    loop = DecodingLoop(policy, ModelLimits(VOCAB_SIZE, None), clock=clock)
    for row, (text, length) in enumerate(zip(texts, lengths)):
        call = _call(row, text[:length], forward, source)
        request = call.requests[0]
        request.row = forward.add()
        request.row.length = length - 1
        forward.set_text(request.row, text)
        loop.add(call)
    return Setting(loop, forward, source)


@cache
def _watched() -> LlamaForCausalLM:
    """Return a model with nearly as many modules as one of 7 billion parameters has."""
    return LlamaForCausalLM(llama_config(8, _WATCHED_LAYERS, 2, intermediate_size=8)).eval()


def _look(model: LlamaForCausalLM, may_wait: bool) -> None:
    """Check whether the model is as it was when it was written out; the stub computes regardless of the result."""
    written_decoder(model, may_wait=may_wait)


def _source(drafts: str, answers: dict[Hashable, np.ndarray]) -> TreeCandidateGenerator:
    if drafts == "none":
        return NoCandidates()
    return SuffixTreeCandidates() if drafts == "suffix" else DrawnTrees(answers, _TREE)


def _policy(drafts: str, cost: CostModel) -> LengthPolicy:
    return NoSpeculation() if drafts == "none" else GoodputAuction(copy.deepcopy(cost))


def _call(row: int, prompt: np.ndarray, forward: StubForward, source: TreeCandidateGenerator) -> DecodingCall:
    ids = torch.from_numpy(prompt)
    batch = DecodingBatch(
        [Request(row, 0, ids, torch.ones_like(ids, dtype=torch.bool), 2**20)],
        StoppingCriteriaList([EosTokenCriteria([2])]),
        pad_token_id=0,
    )
    picker = TokenPicker(LogitsProcessorList(), 1, len(prompt))
    return DecodingCall(forward, batch, picker, coupled_picks, source, most_nodes_of(source))
