"""The paper's experiments (Online Speculative Decoding, section 5), on replayed requests."""

from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np
from torch import nn
from transformers import PreTrainedModel

from hf_smartspec.commands.common.console import track
from hf_smartspec.online.samples import Sample
from hf_smartspec.online.sampling import sampled, taught
from hf_smartspec.online.students import student_of

from .arguments import MIX, ONLINE, SEVERAL, SHIFT, TABLE
from .streams import Replay, Task, acceptance, distilled, judged, mean, options_of
from .tokens import frequent_tokens

Row = dict[str, Any]

# Of the paper's table 1, and the losses beside forward KL: name -> loss, share of the target in what is said.
VARIANTS: dict[str, tuple[str, float]] = {
    "FT": ("labels", 1.0),
    "TF": ("kl", 1.0),
    "SF": ("kl", 0.0),
    "MixF": ("kl", 0.5),
    "TF, reverse KL": ("reverse_kl", 1.0),
    "TF, JSD": ("jsd", 1.0),
}
_EPOCHS = 2  # as in the paper
SHARES = (0.3, 0.5, 0.7, 1.0)  # of the requests, from which figure 4's static drafters are distilled
_OFFLINE_SHARE = 0.1  # of the requests, from which the static drafter is distilled


class Experiments:
    """
    Args:
        target (`PreTrainedModel`): The model that answered.
        drafter (`nn.Module`): The drafter with which all experiments begin.
        tasks (sequence of `Task`): Answered requests.
        args: The command's arguments.
        tokenizer: The target's.
    """

    def __init__(
        self, target: PreTrainedModel, drafter: nn.Module, tasks: Sequence[Task], args: Any, tokenizer: Any = None
    ):
        self.target, self.drafter, self.tasks, self.args, self.tokenizer = target, drafter, tasks, args, tokenizer
        self.options = options_of(args)

    def run(self, part: str) -> Row:
        parts: dict[str, Callable[[], Row]] = {
            TABLE: self.table,
            ONLINE: self.online,
            SHIFT: self.shift,
            MIX: self.mix,
            SEVERAL: self.several,
        }
        return parts[part]()

    def table(self) -> Row:
        """Measure table 1: acceptance rates after two epochs offline, by the texts learnt from, and by loss."""
        rows: Row = {}
        with track(total=len(self.tasks) * len(VARIANTS), desc="distilling offline") as progress:
            for task in self.tasks:
                rows[task.name] = {"original": judged(self.drafter, task.test)}
                for name, (loss, share) in VARIANTS.items():
                    progress.set_postfix_str(f"{task.name}, {name}")
                    samples = task.stream if share == 1 else self._said(task.stream, share)
                    options = options_of(self.args, loss=loss)
                    drafter = distilled(self.drafter, samples, options, _EPOCHS)
                    rows[task.name][name] = judged(drafter, task.test)
                    progress.update(1)
        return {"rows": rows}

    def _said(self, stream: Sequence[Sample], share: float) -> list[Sample]:
        """Return the same prompts, answered by the drafter, or by drafter and target in turn."""
        assert isinstance(self.drafter, PreTrainedModel), "student sampling is for draft models"
        found: list[Sample] = []
        for first in track(range(0, len(stream), 16), desc="drafting answers"):
            prompts = [item.prompt for item in stream[first : first + 16]]
            said = sampled(self.drafter, self.target, prompts, share, self.args.max_new_tokens)
            found += taught(self.target, list(zip(prompts, said)), self.options.top_k, is_greedy=False)
        return found

    def online(self) -> Row:
        """
        Measure figure 3: acceptance over requests, beside a drafter that was distilled offline on the first tenth.
        """
        rows: Row = {}
        for task in self.tasks:
            first = round(_OFFLINE_SHARE * len(task.stream))
            static = distilled(self.drafter, task.stream[:first], self.options, _EPOCHS)
            replay = Replay(self.drafter, self.options, self.args.nodes)
            rates = replay.serve(task.stream, f"{task.name}, online")
            offline = distilled(self.drafter, task.stream, self.options, _EPOCHS)
            counts = replay.learner.statistics
            rows[task.name] = {
                "online": rates,
                "alpha": replay.alphas,
                "static": acceptance(student_of(static), task.stream),
                "unchanged": acceptance(student_of(self.drafter), task.stream),
                "test": {
                    "original": judged(self.drafter, task.test),
                    "static": judged(static, task.test),
                    "online": mean(replay.judge(task.test)),
                    "offline": judged(offline, task.test),
                },
                "tokens": frequent_tokens(self.drafter, replay.drafter, task.test, self.tokenizer),
                "learning": {"updates": counts.updates, "rollbacks": counts.rollbacks, "seconds": counts.seconds},
            }
        return {"rows": rows}

    def shift(self) -> Row:
        """
        Measure figures 4 and 11, tasks one after the other and blended, beside static drafters, and figure 9, what is
        forgotten.
        """
        found: Row = {}
        for name, order in (("sudden", _sudden(self.tasks)), ("gradual", blended(self.tasks, self.args.seed))):
            replay = Replay(self.drafter, self.options, self.args.nodes)
            rates: list[float] = []
            kept: dict[str, list[float]] = {task.name: [] for task in self.tasks}
            num = max(round(len(order) / len(self.tasks)), 1)
            for phase in range(len(self.tasks)):
                last = None if phase == len(self.tasks) - 1 else num * (phase + 1)
                rates += replay.serve([sample for _, sample in order[num * phase : last]], f"{name} shift")
                for task in self.tasks:
                    kept[task.name].append(mean(replay.judge(task.test)))
            found[name] = {"tasks": [task for task, _ in order], "online": rates, "test after each phase": kept}
        return {"rows": found, "static": {task.name: self._static(task) for task in self.tasks}}

    def _static(self, task: Task) -> dict[str, list[float]]:
        """
        Return the acceptance of a task's requests by drafters that were distilled on shares of as many requests of it:
        on others than these, where there are any.
        """
        found = {}
        for share in SHARES:
            some = (task.others or task.stream)[: max(round(share * len(task.stream)), 1)]
            drafter = distilled(self.drafter, some, self.options, _EPOCHS, f"{task.name}, {share:.0%} of the requests")
            found[f"{share:.0%}"] = acceptance(student_of(drafter), task.stream)
        return found

    def mix(self) -> Row:
        """
        Measure figure 9 (appendix A.6): requests of two tasks in a random order; the first half of them teaches by the
        first task's requests only, the second half by the second's.
        """
        rows: Row = {}
        generator = np.random.default_rng(self.args.seed)
        for first, second in pairwise(self.tasks):
            order = _sudden([first, second])
            order = [order[index] for index in generator.permutation(len(order))]
            replay, half, rates = Replay(self.drafter, self.options, self.args.nodes), len(order) // 2, list[float]()
            for task, part in ((first, order[:half]), (second, order[half:])):
                taught_by = {id(sample) for name, sample in part if name == task.name}
                desc = f"learning {task.name} only"
                rates += replay.serve([sample for _, sample in part], desc, lambda sample: id(sample) in taught_by)  # noqa: B023
            rows[f"{first.name}, {second.name}"] = {"tasks": [name for name, _ in order], "online": rates, "half": half}
        return {"rows": rows}

    def several(self) -> Row:
        """
        Measure figures 5 and 6: requests of all kinds in a random order, one drafter for all against one for each kind.
        """
        order = list(chain.from_iterable([(task.name, item) for item in task.stream] for task in self.tasks))
        order = [order[index] for index in np.random.default_rng(self.args.seed).permutation(len(order))]
        together = Replay(self.drafter, self.options)
        rates = together.serve([item for _, item in order], "one drafter")
        rows: Row = {}
        for task in self.tasks:
            own = Replay(self.drafter, self.options)
            alone = own.serve([item for name, item in order if name == task.name], f"{task.name}, a drafter of its own")
            rows[task.name] = {
                "one drafter": [rate for (name, _), rate in zip(order, rates) if name == task.name],
                "its own": alone,
                "test": {"one drafter": mean(together.judge(task.test)), "its own": mean(own.judge(task.test))},
            }
        return {"rows": rows}


def _sudden(tasks: Sequence[Task]) -> list[tuple[str, Sample]]:
    return [(task.name, item) for task in tasks for item in task.stream]


def blended(tasks: Sequence[Task], seed: int) -> list[tuple[str, Sample]]:
    """
    Return the requests of tasks that give way to one another: the probability of each falls linearly to 0 while that of
    the next rises to 1 (appendix A.8). Where a task has no request left, its neighbour's come.
    """
    generator, left = np.random.default_rng(seed), [list(task.stream) for task in tasks]
    num = sum(map(len, left)) if len(tasks) <= 2 else (len(tasks) - 1) * min(map(len, left))
    order = []
    for place in np.linspace(0, len(tasks) - 1, num):
        before = min(int(place), max(len(tasks) - 2, 0))
        chosen = [before, before + 1][: len(tasks)]
        if generator.random() < place - before:
            chosen.reverse()
        for index in chosen:
            if left[index]:
                order.append((tasks[index].name, left[index].pop(0)))
                break
    return order
