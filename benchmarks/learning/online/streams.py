"""Requests of several tasks, answered by the target once, and replayed to drafters that learn."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from hf_smartspec.commands.common.arguments import UsageError
from hf_smartspec.commands.common.console import track
from hf_smartspec.commands.common.recordings import DataSet, Recording, answered
from hf_smartspec.online.learner import Learner
from hf_smartspec.online.options import LearningOptions
from hf_smartspec.online.samples import Batch, Sample, in_batches
from hf_smartspec.online.sampling import taught
from hf_smartspec.online.students import Student, student_of

_AT_ONCE = 16  # texts that are answered, or scored, together
TOP_K = 64


class Task(NamedTuple):
    """Requests of one kind, answered: some that come, and some that are kept for judging."""

    name: str
    stream: list[Sample]
    test: list[Sample]


def answer(
    target: PreTrainedModel, data: DataSet, num_test: int, max_new_tokens: int, layers: Sequence[int] = ()
) -> Task:
    """Return the target's greedy answers to prompts, with its distribution of each token."""
    if len(data.prompts) <= num_test:
        raise UsageError(f"{data.name!r} has {len(data.prompts)} different prompts, and {num_test} are for judging")
    asked = [Recording(np.array(prompt, np.int64), np.empty(0, np.int64)) for prompt in data.prompts]
    texts = answered(asked, target, _AT_ONCE, max_new_tokens, f"answering {data.name}")
    samples: list[Sample] = []
    ordered = sorted(range(len(texts)), key=lambda index: len(texts[index].prompt) + len(texts[index].response))
    with track(total=len(ordered), desc=f"scoring answers of {data.name}") as progress:
        for first in range(0, len(ordered), _AT_ONCE):
            part = [texts[index] for index in ordered[first : first + _AT_ONCE]]
            samples += taught(target, [(item.prompt, item.response) for item in part], TOP_K, layers)
            progress.update(len(part))
    in_order = [samples[ordered.index(index)] for index in range(len(texts))]
    return Task(data.name, in_order[num_test:], in_order[:num_test])


def options_of(args: Any, **changes: Any) -> LearningOptions:
    return replace(
        LearningOptions(
            every_requests=args.interval,
            learning_rate=args.learning_rate,
            batch_tokens=1024,
            top_k=TOP_K,
            background=False,
            shadow=8,
            seed=args.seed,
        ),
        **changes,
    )


def copied(drafter: nn.Module) -> nn.Module:
    """Return a copy with weights of its own; weights that it shares with its target stay shared."""
    shared = getattr(drafter, "_target_parts", None) or list(getattr(drafter, "outputs", ()))
    return copy.deepcopy(drafter, {id(item): item for item in shared})


def shadow(student: Student, samples: Sequence[Sample]) -> list[tuple[np.ndarray, np.ndarray]]:
    """
    Return for each sample the tokens that the drafter would have drafted first after each token of the text, as tokens
    of the target, and the tokens that came; of heads, the first one's.
    """
    found: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    order = {id(sample): index for index, sample in enumerate(samples)}
    for group in in_batches(samples, 4096):
        batch = Batch.of(group, student.device)
        with (
            torch.no_grad(),
            torch.autocast(student.device.type, student.dtype, enabled=student.dtype.itemsize == 2),
        ):
            item = next(iter(student.predictions(batch)))
        best = item.logits.argmax(dim=-1)
        if student.own_ids is not None:
            best = student.own_ids[best]
        rows = item.where.nonzero()[:, 0].cpu().numpy()
        drafted, came = best.cpu().numpy(), batch.ids[item.where].cpu().numpy()
        for row, sample in enumerate(group):
            found[order[id(sample)]] = drafted[rows == row], came[rows == row]
    return [found[index] for index in range(len(samples))]


def acceptance(student: Student, samples: Sequence[Sample]) -> list[float]:
    """Return the acceptance rate of each sample: the share of first drafted tokens that the target chose."""
    return [float((drafted == came).mean()) if len(came) else 0.0 for drafted, came in shadow(student, samples)]


def mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else float("nan")


class Replay:
    """
    Algorithm 1 over requests that were answered before: each is drafted with the weights of its time, and is then
    learnt.

    Args:
        drafter (`nn.Module`): Stays as it is: a copy learns.
    """

    def __init__(self, drafter: nn.Module, options: LearningOptions):
        self.drafter = copied(drafter)
        self.learner = Learner(student_of(self.drafter), options)

    def serve(self, samples: Sequence[Sample], desc: str = "") -> list[float]:
        """Return the acceptance rate of each sample, drafted before it is learnt."""
        rates: list[float] = []
        learner = self.learner
        interval = learner.options.every_requests or len(samples)
        with track(total=len(samples), desc=desc or "learning online") as progress:
            for first in range(0, len(samples), interval):
                part = list(samples[first : first + interval])
                rates += self.judge(part)
                for sample in part:
                    learner._keep(sample)
                if learner.is_due:
                    learner.update()
                    learner.publish()
                progress.update(len(part))
        return rates

    def judge(self, samples: Sequence[Sample]) -> list[float]:
        """Return acceptance rates of the present weights."""
        student = self.learner.student
        student.take(student.live_weights())
        return acceptance(student, samples)


def distilled(
    drafter: nn.Module,
    samples: Sequence[Sample],
    options: LearningOptions,
    epochs: int,
    desc: str = "distilling offline",
) -> nn.Module:
    """Return a copy that has learnt all samples offline, in `epochs` passes."""
    options = replace(options, every_requests=1, passes=epochs, shadow=0, max_bytes=2**40)
    replay = Replay(drafter, options)
    for sample in samples:
        replay.learner._keep(sample)
    num = epochs * len(in_batches([item.end(options.max_length) for item in samples], options.batch_tokens))
    with track(total=num, desc=desc) as progress:
        replay.learner.update(progress.update)
    replay.learner.publish()
    return replay.drafter


def judged(drafter: nn.Module, samples: Sequence[Sample]) -> float:
    """Return a drafter's mean acceptance rate."""
    return mean(acceptance(student_of(drafter), samples))
