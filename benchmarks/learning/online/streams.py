"""Requests of several tasks, answered by the target once, and replayed to drafters that learn."""

import copy
from collections.abc import Callable, Sequence
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
from hf_smartspec.online.losses import overlap
from hf_smartspec.online.options import LearningOptions
from hf_smartspec.online.samples import Batch, Sample, in_batches
from hf_smartspec.online.sampling import sampled, taught
from hf_smartspec.online.students import Student, student_of

K = 5  # the paper's proposals of a step
_AT_ONCE = 16  # texts that are sampled, or scored, together


class Task(NamedTuple):
    """
    Requests of one kind, answered: some that come, some that are kept for judging, and others from which static
    drafters are distilled.
    """

    name: str
    stream: list[Sample]
    test: list[Sample]
    others: list[Sample]


def answer(target: PreTrainedModel, data: DataSet, num_test: int, args: Any, layers: Sequence[int] = ()) -> Task:
    """Return the target's answers to prompts, greedy or `args.sampled`, with its distribution of each token."""
    if len(data.prompts) <= num_test:
        raise UsageError(f"{data.name!r} has {len(data.prompts)} different prompts, and {num_test} are for judging")
    asked = [Recording(np.array(prompt, np.int64), np.empty(0, np.int64)) for prompt in data.prompts]
    if args.sampled:
        texts = _sampled(asked, target, args)
    else:
        texts = answered(asked, target, args.max_new_tokens, f"answering {data.name}")
    top_k = options_of(args).top_k
    samples: list[Sample] = []
    ordered = sorted(range(len(texts)), key=lambda index: len(texts[index].prompt) + len(texts[index].response))
    with track(total=len(ordered), desc=f"scoring answers of {data.name}") as progress:
        for first in range(0, len(ordered), _AT_ONCE):
            part = [texts[index] for index in ordered[first : first + _AT_ONCE]]
            samples += taught(target, [(item.prompt, item.response) for item in part], top_k, layers, not args.sampled)
            progress.update(len(part))
    in_order = [samples[ordered.index(index)] for index in range(len(texts))]
    first, last = num_test, num_test + args.requests
    return Task(data.name, in_order[first:last], in_order[:first], in_order[last:])


def _sampled(asked: Sequence[Recording], target: PreTrainedModel, args: Any) -> list[Recording]:
    """Return the same prompts with answers that the target samples from its own distribution."""
    torch.manual_seed(args.seed)
    texts: list[Recording] = []
    for first in track(range(0, len(asked), _AT_ONCE), desc="sampling answers"):
        prompts = [item.prompt for item in asked[first : first + _AT_ONCE]]
        responses = sampled(target, target, prompts, 0.0, args.max_new_tokens)
        texts += [Recording(*pair) for pair in zip(prompts, responses)]
    return texts


def options_of(args: Any, preset: str | None = None, **changes: Any) -> LearningOptions:
    """Return the options of learning; the preset, by default `args.preset`, decides on all that no argument names."""
    options = LearningOptions.of(
        preset or args.preset,
        every_requests=args.interval,
        learning_rate=args.learning_rate,
        batch_tokens=1024,
        background=False,
        seed=args.seed,
    )
    return replace(options, **changes)


def copied(drafter: nn.Module) -> nn.Module:
    """Return a copy with weights of its own; weights that it shares with its target stay shared."""
    shared = getattr(drafter, "_target_parts", None) or list(getattr(drafter, "outputs", ()))
    return copy.deepcopy(drafter, {id(item): item for item in shared})


class Shadow(NamedTuple):
    """
    What a drafter would have drafted first in the place of each token of one text; of heads, the first one's.

    Args:
        drafted, came (`np.ndarray` of shape `[n]`, int64): Its likeliest tokens, as tokens of the target, and the
            target's own.
        chances (`np.ndarray` of shape `[n]`, float32): Probabilities that its proposals are accepted: of greedy
            samples 0 or 1, of others the sum of min(p, q) over the tokens that are kept of p (appendix A.1).
        places (`np.ndarray` of shape `[n]`, int64): Their places in the response: heads have no draft of its first.
    """

    drafted: np.ndarray
    came: np.ndarray
    chances: np.ndarray
    places: np.ndarray


def shadow(student: Student, samples: Sequence[Sample]) -> list[Shadow]:
    """Return the shadow drafts of samples."""
    found: dict[int, Shadow] = {}
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
        shares = overlap(item.logits, student.own(batch.top_ids[item.where]), batch.top_probs[item.where])
        rows, columns = item.where.nonzero().cpu().numpy().T
        drafted, came = best.cpu().numpy(), batch.ids[item.where].cpu().numpy()
        for row, sample in enumerate(group):
            chances = (drafted == came).astype(np.float32) if sample.is_greedy else shares.cpu().numpy()
            own = (item[rows == row] for item in (drafted, came, chances, columns - len(sample.prompt)))
            found[order[id(sample)]] = Shadow(*own)
    return [found[index] for index in range(len(samples))]


def proposed(is_accepted: np.ndarray, k: int) -> np.ndarray:
    """
    Return which tokens of a text stand in the place of a proposal that verification looks at, bool `[n]`: each step has
    k proposals, of which it accepts those before the first wrong one, and adds one token (algorithm 1, lines 10-16).
    That token takes the place of the wrong proposal or, after k accepted ones, of none.

    Args:
        is_accepted (`np.ndarray` of shape `[n]`, bool): Whether a proposal in this place is accepted.
    """
    is_proposed, run = np.ones(len(is_accepted), bool), 0
    for place, accepted in enumerate(is_accepted):
        is_proposed[place] = run < k
        run = run + 1 if accepted and run < k else 0
    return is_proposed


class Served(NamedTuple):
    """
    A text as speculative decoding with k proposals a step serves it.

    Args:
        rate (`float`): Mean acceptance over all of its tokens.
        alpha (`float`): The paper's: the mean over the proposals that verification looks at (`proposed`).
        errors (`np.ndarray` of shape `[n]`, bool): Tokens in the place of rejected proposals.
    """

    rate: float
    alpha: float
    errors: np.ndarray


def served(student: Student, samples: Sequence[Sample], k: int, generator: np.random.Generator) -> list[Served]:
    """Serve texts in the drafter's shadow; where the target has sampled, proposals are accepted by chance."""
    found = []
    for sample, (_, _, chances, places) in zip(samples, shadow(student, samples)):
        is_accepted = generator.random(len(chances)) < chances
        is_proposed = proposed(is_accepted, k)
        errors = np.zeros(len(sample.response), bool)
        errors[places] = is_proposed & ~is_accepted
        found.append(Served(_rate(chances), _rate(chances[is_proposed]), errors))
    return found


def acceptance(student: Student, samples: Sequence[Sample]) -> list[float]:
    """Return the acceptance rate of each sample: the mean over its tokens, whatever a step proposes."""
    return [_rate(item.chances) for item in shadow(student, samples)]


def _rate(chances: np.ndarray) -> float:
    """Return the mean; 0 for texts without a token that could be drafted."""
    return mean(chances) if len(chances) else 0.0


def mean(values: Sequence[float] | np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else float("nan")


class Replay:
    """
    Algorithm 1 over requests that were answered before: each is drafted with the weights of its time, and is then
    learnt.

    Args:
        drafter (`nn.Module`): Stays as it is: a copy learns.
        k (`int`): Proposals of a step.

    Attributes:
        alphas (list of `float`): The acceptance rate of each sample as the paper has it, see `Served`.
    """

    def __init__(self, drafter: nn.Module, options: LearningOptions, k: int = K):
        self.drafter, self.k, self.alphas = copied(drafter), k, list[float]()
        self.learner = Learner(student_of(self.drafter), options)
        self._generator = np.random.default_rng(options.seed)

    def serve(
        self, samples: Sequence[Sample], desc: str = "", learns: Callable[[Sample], bool] = lambda _: True
    ) -> list[float]:
        """
        Return the acceptance rate of each sample, drafted before it is learnt.

        Args:
            learns (`Callable`): Whether a sample is learnt.
        """
        rates: list[float] = []
        learner = self.learner
        interval = learner.options.every_requests or len(samples)
        with track(total=len(samples), desc=desc or "learning online") as progress:
            for first in range(0, len(samples), interval):
                part = list(samples[first : first + interval])
                learner.student.take(learner.student.live_weights())
                found = served(learner.student, part, self.k, self._generator)
                rates += [item.rate for item in found]
                self.alphas += [item.alpha for item in found]
                for sample, item in zip(part, found):
                    if learns(sample):
                        learner._keep(replace(sample, errors=item.errors))
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
    """Return a copy that has learnt all samples offline, all positions (equation 4), in `epochs` passes."""
    options = replace(options, every_requests=1, passes=epochs, shadow=0, max_bytes=2**40, positions="all")
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
