"""Cost of learning in the background to the requests that are served meanwhile."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn
from transformers import PreTrainedModel

from hf_smartspec.commands.common.console import track
from hf_smartspec.online.distillation import OnlineDistillation
from hf_smartspec.online.samples import Sample
from hf_smartspec.serving.engine import Engine

from .streams import Task, copied

LOADS = {"low": 4.0, "high": 0.3}  # gaps between requests, in times of a lone one
_NO_RATE = 1e-12  # drafts stay what they are: what is measured is learning, not what it brings
_ROUNDS = 4  # an even number: each way goes first as often as the other
_WARMING = 4  # requests that are served before, both ways


def load(target: PreTrainedModel, drafter: nn.Module, tasks: Sequence[Task], args: Any) -> dict[str, Any]:
    """
    Measure the latency of requests that arrive at random, with and without learning in the background, in turn and at
    the same times: at low load, where there is capacity, and at high load, where there is none. The numbers of one
    request stand in the same place in both lists.
    """
    samples = [sample for group in zip(*(task.stream for task in tasks)) for sample in group]
    samples = samples[: args.load_requests]
    alone = _service_seconds(target, drafter, samples[:4], args.max_new_tokens)
    for learns in (True, False):  # warm up
        _served(target, drafter, samples[:_WARMING], np.zeros(len(samples)), learns, args)
    rows: dict[str, Any] = {name: {"off": [], "on": [], "updates": []} for name in LOADS}
    with track(total=len(LOADS) * _ROUNDS * 2, desc="serving") as progress:
        for name, gap in LOADS.items():
            for number in range(_ROUNDS):
                gaps = np.random.default_rng(args.seed + number).exponential(gap * alone, len(samples))
                for mode in ("off", "on") if number % 2 else ("on", "off"):
                    latencies, updates = _served(target, drafter, samples, gaps, mode == "on", args)
                    rows[name][mode] += latencies
                    if mode == "on":
                        rows[name]["updates"].append(updates)
                    progress.update(1)
    return {"rows": rows, "seconds alone": alone}


def _service_seconds(target: PreTrainedModel, drafter: nn.Module, samples: Sequence[Sample], num: int) -> float:
    with Engine(target, drafter) as engine:
        for sample in samples:
            start = time.perf_counter()
            engine.get_result(engine.add_request(sample.prompt, max_new_tokens=num))
            seconds = time.perf_counter() - start
    return seconds


def _served(
    target: PreTrainedModel, drafter: nn.Module, samples: Sequence[Sample], gaps: np.ndarray, learns: bool, args: Any
) -> tuple[list[float], int]:
    """Return latencies, and the number of updates that ended while requests came."""
    online = None
    if learns:
        online = OnlineDistillation(every_requests=args.interval, learning_rate=_NO_RATE, batch_tokens=512)
    with Engine(target, copied(drafter), online=online) as engine:
        names = []
        for sample, gap in zip(samples, gaps):
            time.sleep(gap)
            names.append(engine.add_request(sample.prompt, max_new_tokens=args.max_new_tokens))
        outputs = [engine.get_result(name) for name in names]
        updates = 0 if online is None else sum(item.updates for item in online.statistics.values())
    if online is not None:
        online.close()
    return [output.lifespan[1] - output.created_time for output in outputs if output is not None], updates
