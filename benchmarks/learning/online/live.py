"""Latency before and after learning, and while drafters learn: between requests, and in the background."""

import copy
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import PreTrainedModel

from hf_smartspec.candidates import MedusaHeads
from hf_smartspec.candidates.heads.eagle.heads import EagleHeads
from hf_smartspec.commands.common.arguments import UsageError, usage_errors
from hf_smartspec.commands.common.console import track
from hf_smartspec.generate import enabled
from hf_smartspec.online.distillation import OnlineDistillation
from hf_smartspec.online.samples import Sample
from hf_smartspec.prepare.config import SmartSpecConfig
from hf_smartspec.serving.engine import Engine
from hf_smartspec.training.eagle import new_heads

from .costs import speedup
from .streams import Replay, Task, copied, judged, options_of

_NODES = 5  # the paper's k
NONE = "none"
PUBLISHED, LEARNT = " + algorithm 1", " + online"  # after a drafter's name: how it has learnt
_WINDOWS = 8  # of the live run


def _generate(model: PreTrainedModel, sample: Sample, num: int, assistant: Any = None) -> tuple[float, list[int], Any]:
    """Return seconds, tokens and statistics of one request."""
    ids = torch.from_numpy(sample.prompt).long()[None].to(model.device)
    generate: Any = model.generate
    arguments = {"max_new_tokens": num, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    start = time.perf_counter()
    if assistant is None:
        output = generate(ids, **arguments)
        return time.perf_counter() - start, output[0, ids.shape[1] :].tolist(), None
    output = generate(ids, assistant=assistant, return_dict_in_generate=True, **arguments)
    return time.perf_counter() - start, output.sequences[0, ids.shape[1] :].tolist(), output.statistics


def speed(target: PreTrainedModel, drafters: dict[str, nn.Module], tasks: Sequence[Task], args: Any) -> dict[str, Any]:
    """
    Measure tables 3 and 4: each drafter before and after it has learnt the stream online, by algorithm 1 as published
    and as here by default, one request at a time, beside the speed-up that Eq. 1 predicts from the acceptance rate.
    """
    rows: dict[str, Any] = {}
    num = args.max_new_tokens
    with enabled(target):
        for task in tasks:
            methods: dict[str, nn.Module] = {}
            for name, drafter in drafters.items():
                methods[name] = drafter
                for preset, learnt in (("published", f"{name}{PUBLISHED}"), (None, f"{name}{LEARNT}")):
                    replay = Replay(drafter, options_of(args, preset))
                    replay.serve(task.stream, f"{task.name}, {learnt}")
                    methods[learnt] = replay.drafter
            rows[task.name] = _measured(target, methods, task, num)
    return {"rows": rows, "nodes": _NODES}


def _measured(target: PreTrainedModel, methods: dict[str, nn.Module], task: Task, num: int) -> dict[str, Any]:
    """Measure chains of a fixed length, and last the drafts of the last drafter where goodput decides on these."""
    assistants: dict[str, Any] = {NONE: SmartSpecConfig(NONE)}
    assistants |= {name: SmartSpecConfig(drafter, num_nodes=_NODES) for name, drafter in methods.items()}
    last, drafter = list(methods.items())[-1]
    assistants[f"{last}, auction"] = SmartSpecConfig(drafter)
    plain: list[float] = []
    runs: dict[str, list[Any]] = {name: [] for name in assistants}
    asked = [task.test[0], *task.test]  # the first one warms up
    with track(asked, desc=f"timing {task.name}") as progress:
        for sample in progress:
            seconds, tokens, _ = _generate(target, sample, num)
            plain.append(seconds / len(tokens))
            for name, assistant in assistants.items():
                found = _generate(target, sample, num, assistant)
                runs[name].append((found[0] / len(found[1]), found[1] == tokens, found[2]))
    rows = {}
    for name, own in runs.items():
        own = own[1:]
        total = sum([item[2] for item in own[1:]], own[0][2])
        rows[name] = {
            "acceptance": None,
            "tokens per step": total.mean_accepted_length,
            "speed-up": median(p / item[0] for p, item in zip(plain[1:], own)),
            "predicted": None,
            "different": sum(not item[1] for item in own),
        }
        if name in methods:
            # Eq. 1: c is a drafted token's time over that of a token of the target.
            cost = total.seconds_draft / max(total.drafted_tokens, 1) / median(plain[1:])
            rate = judged(methods[name], task.test)
            rows[name] |= {"acceptance": rate, "predicted": speedup(rate, _NODES, cost)}
    return rows


def random_drafter(kind: str, target: PreTrainedModel, draft: PreTrainedModel, seed: int) -> nn.Module:
    """Return a drafter of random weights, of the draft's size, or for heads of the target's."""
    torch.manual_seed(seed)
    dtype, device = target.dtype, target.device
    if kind == "draft":
        model: Any = type(draft)(copy.deepcopy(draft.config))
        return model.to(device=device, dtype=dtype).eval()
    if kind == "eagle3":
        # Of sizes that no config has, as enlarged models may have.
        with usage_errors("--random eagle3: heads of this target cannot be made", StrictDataclassError, ValueError):
            heads: EagleHeads = new_heads(target, neurons=640, seed=seed).to(dtype)
        return heads.requires_grad_(False)
    output: Any = target.get_output_embeddings()
    size = output.weight.shape[1]
    zeros: Any = [[(torch.zeros(size, size), torch.zeros(size))] for _ in range(4)]
    return MedusaHeads(zeros, [output.weight.detach()], shares_output=True).to(device=device, dtype=dtype)


def live(target: PreTrainedModel, drafter: nn.Module, tasks: Sequence[Task], args: Any) -> dict[str, Any]:
    """
    Serve requests one after the other, each decoded without speculation and with a drafter that begins with random
    weights and learns between them; seconds include those of learning.
    """
    online = OnlineDistillation(
        every_requests=args.interval, learning_rate=args.learning_rate, background=False, batch_tokens=1024, shadow=4
    )
    samples = [sample for group in zip(*(task.stream for task in tasks)) for sample in group]
    if not samples:
        raise UsageError("there is nothing to serve")
    assistant = SmartSpecConfig(drafter, online=online)
    rows: list[dict[str, Any]] = []
    begin, different = time.perf_counter(), 0
    with enabled(target), track(total=len(samples), desc="learning live") as progress:
        for sample in samples:
            plain, tokens, _ = _generate(target, sample, args.max_new_tokens)
            seconds, own, counts = _generate(target, sample, args.max_new_tokens, assistant)
            different += own != tokens
            (learnt,) = online.statistics.values()
            rows.append({"plain": plain, "online": seconds, "tokens": len(tokens), "learning": learnt.seconds,
                         "drafted": counts.drafted_tokens, "accepted": counts.accepted_tokens})  # fmt: skip
            progress.update(1)
            if time.perf_counter() - begin > args.live_seconds:
                break
    return {"requests": rows, "windows": _windows(rows), "different": different, "report": online.report()}


def _windows(rows: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """Return figures of parts of the run, each of as many requests."""
    size = max(len(rows) // _WINDOWS, 1)
    found = []
    for first in range(0, len(rows) - size + 1, size):
        part = rows[first : first + size]
        plain, own = sum(row["plain"] for row in part), sum(row["online"] for row in part)
        learning = part[-1]["learning"] - (rows[first - 1]["learning"] if first else 0.0)
        found.append({"speed-up": plain / own, "without learning": plain / max(own - learning, 1e-9)})
    return found


# Learning in the background.

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
