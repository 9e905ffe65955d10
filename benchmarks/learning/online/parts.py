"""The paper's experiments (Online Speculative Decoding, section 5), on replayed requests."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
from torch import nn
from transformers import PreTrainedModel

from hf_smartspec.commands.common.console import track
from hf_smartspec.online.samples import Sample
from hf_smartspec.online.sampling import sampled, taught
from hf_smartspec.online.students import student_of

from .arguments import ONLINE, SEVERAL, SHIFT, TABLE
from .streams import TOP_K, Replay, Task, acceptance, distilled, judged, mean, options_of, shadow

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
_FREQUENT = 100  # tokens of figure 7
_OFFLINE_SHARE = 0.1  # of the requests, from which the static drafter is distilled


class Experiments:
    """
    Args:
        target (`PreTrainedModel`): The model that answered.
        drafter (`nn.Module`): The drafter with which all experiments begin.
        tasks (sequence of `Task`): Answered requests.
        args: The command's arguments.
    """

    def __init__(self, target: PreTrainedModel, drafter: nn.Module, tasks: Sequence[Task], args: Any):
        self.target, self.drafter, self.tasks, self.args = target, drafter, tasks, args
        self.options = options_of(args)

    def run(self, part: str) -> Row:
        parts: dict[str, Callable[[], Row]] = {
            TABLE: self.table,
            ONLINE: self.online,
            SHIFT: self.shift,
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
            found += taught(self.target, list(zip(prompts, said)), TOP_K, is_greedy=False)
        return found

    def online(self) -> Row:
        """
        Measure figure 3: acceptance over requests, beside a drafter that was distilled offline on the first tenth.
        """
        rows: Row = {}
        for task in self.tasks:
            first = round(_OFFLINE_SHARE * len(task.stream))
            static = distilled(self.drafter, task.stream[:first], self.options, _EPOCHS)
            replay = Replay(self.drafter, self.options)
            rates = replay.serve(task.stream, f"{task.name}, online")
            offline = distilled(self.drafter, task.stream, self.options, _EPOCHS)
            counts = replay.learner.statistics
            rows[task.name] = {
                "online": rates,
                "static": acceptance(student_of(static), task.stream),
                "unchanged": acceptance(student_of(self.drafter), task.stream),
                "test": {
                    "original": judged(self.drafter, task.test),
                    "static": judged(static, task.test),
                    "online": mean(replay.judge(task.test)),
                    "offline": judged(offline, task.test),
                },
                "tokens": frequent_tokens(self.drafter, replay.drafter, task.test),
                "learning": {"updates": counts.updates, "rollbacks": counts.rollbacks, "seconds": counts.seconds},
            }
        return {"rows": rows}

    def shift(self) -> Row:
        """Measure figures 4 and 11, tasks one after the other and merging, and figure 9, what is forgotten."""
        found: Row = {}
        for name, order in (("sudden", _sudden(self.tasks)), ("gradual", _gradual(self.tasks, self.args.seed))):
            replay = Replay(self.drafter, self.options)
            rates: list[float] = []
            kept: dict[str, list[float]] = {task.name: [] for task in self.tasks}
            num = len(self.tasks[0].stream)
            for phase in range(0, len(order), num):
                rates += replay.serve([sample for _, sample in order[phase : phase + num]], f"{name} shift")
                for task in self.tasks:
                    kept[task.name].append(mean(replay.judge(task.test)))
            found[name] = {"tasks": [task for task, _ in order], "online": rates, "test after each phase": kept}
        offline = {
            task.name: judged(distilled(self.drafter, task.stream, self.options, _EPOCHS), task.test)
            for task in self.tasks
        }
        return {"rows": found, "offline": offline}

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


def _gradual(tasks: Sequence[Task], seed: int) -> list[tuple[str, Sample]]:
    """Return the requests of tasks that merge: mostly in the phase of a sudden shift, some a phase earlier or later."""
    generator = np.random.default_rng(seed)
    placed = []
    for phase, task in enumerate(tasks):
        times = phase + 0.5 + generator.normal(0, 0.5, len(task.stream))
        placed += [(time, task.name, item) for time, item in zip(times, task.stream)]
    return [(name, item) for _, name, item in sorted(placed, key=lambda entry: entry[0])]


def frequent_tokens(before: nn.Module, after: nn.Module, samples: Sequence[Sample]) -> Row:
    """Measure figure 7 and table 6: precision and recall of the most frequent tokens, means over these."""
    counts = Counter(int(token) for item in samples for token in item.response)
    tokens = [token for token, _ in counts.most_common(_FREQUENT)]
    return {name: _precision(module, samples, tokens) for name, module in (("original", before), ("online", after))}


def _precision(module: nn.Module, samples: Sequence[Sample], tokens: Sequence[int]) -> dict[str, float]:
    drafted, came = (np.concatenate(parts) for parts in zip(*shadow(student_of(module), samples)))
    right = drafted == came
    precisions = [right[drafted == token].mean() for token in tokens if (drafted == token).any()]
    recalls = [right[came == token].mean() for token in tokens if (came == token).any()]
    return {"precision": mean(precisions), "recall": mean(recalls)}
