"""Su et al.'s profiling stage: the best draft length for each batch size, measured and by their model."""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from transformers import PreTrainedModel

from ...goodput import BatchLookupTable, PowerLaw, StepOutcome, StepRows, correct_lengths, optimal_length
from ...goodput.papers.policies import ShapedDrafts
from ...prepare.config import SmartSpecConfig
from ...serving.engine import Engine
from ...serving.outputs import EngineOutput
from ..common.console import table, track

Prompts = Sequence[Sequence[int] | np.ndarray]
_LEAST_PROMPTS = 8  # by which each batch size is measured: drafts of a single text say little about others


class Times(NamedTuple):
    """Seconds of decoding without prompts, for one batch size and draft length."""

    per_token: float  # of a request, the mean over requests
    per_step: float


class Profile(NamedTuple):
    """
    What the profiling stage finds.

    Args:
        table (`BatchLookupTable`): The length of the least seconds per token for each batch size.
        grid (`dict`): Times by batch size and draft length.
        correct (`list` of `float`): l(s), the mean number of correct tokens in drafts of s = 1, 2, ... tokens (Eq. 4).
        law (`PowerLaw`, *optional*): Its approximation c * s ** gamma (Eq. 5); None where hardly any token was correct.
    """

    table: BatchLookupTable
    grid: dict[int, dict[int, Times]]
    correct: list[float]
    law: PowerLaw | None

    def modelled(self) -> dict[int, float]:
        """
        Return s_opt by batch size (Eq. 12), with alpha_b and beta of a line through the measured seconds of steps,
        t_L(b, s) + s * t_S(b, 1) = alpha_b * s + beta. Each batch size has a beta of its own; the paper has one.
        """
        found: dict[int, float] = {}
        if self.law is None:
            return found
        for size, cells in self.grid.items():
            per_node, per_step = np.polyfit(list(cells), [times.per_step for times in cells.values()], 1)
            found[size] = optimal_length(self.law, max(float(per_node), 0.0), max(float(per_step), 1e-9))
        return found

    def as_dict(self) -> dict[str, Any]:
        return {
            "lengths": self.table.lengths,
            "grid": {size: {s: times._asdict() for s, times in cells.items()} for size, cells in self.grid.items()},
            "correct": self.correct,
            "law": None if self.law is None else self.law._asdict(),
            "modelled": self.modelled(),
        }


class LongDraft(ShapedDrafts):
    """
    One long draft for each request, the first, and none afterwards; `accepted` are the numbers of correct tokens.

    Args:
        length (`int`): Tokens of the draft.
    """

    def __init__(self, length: int):
        self.length = length
        self.accepted: dict[Hashable, int] = {}

    def shapes(self, rows: StepRows) -> Sequence[tuple[int, ...]]:
        return [() if name in self.accepted else (1,) * self.length for name in rows.request_ids]

    def most_nodes(self, usual: int, most: int) -> int:
        return self.length

    def observe(self, outcome: StepOutcome) -> None:
        asked = outcome.rows.stages[0].asked.tolist()
        for name, number, accepted in zip(outcome.rows.request_ids, asked, outcome.accepted):
            if number:
                self.accepted.setdefault(name, accepted)


def measure_table(
    model: PreTrainedModel, config: SmartSpecConfig, prompts: Prompts, most_rows: int, most_tokens: int,
    max_new_tokens: int, long_draft: int,
) -> Profile:  # fmt: skip
    """
    Measure every power of two up to `most_rows` with every length up to `most_tokens`, as section 4 does, small batches
    several times with other prompts, and l(s) by one draft of `long_draft` tokens for each prompt, as section 3.3.1
    does.
    """
    correct = correct_lengths(long_drafts(model, config, prompts, most_rows, long_draft), long_draft)
    grid: dict[int, dict[int, Times]] = {}
    decode_batch(model, config, prompts, 1, most_tokens, max_new_tokens)  # warms up
    with track(total=most_rows.bit_length() * (most_tokens + 1), desc="measuring batches") as progress:

        def seconds_per_token(size: int, length: int) -> float:
            firsts = range(0, min(len(prompts), _LEAST_PROMPTS), size)
            parts = [
                decode_batch(model, config, [*prompts[first:], *prompts[:first]], size, length, max_new_tokens)
                for first in firsts
            ]
            times = Times(*np.mean(parts, axis=0).tolist())
            grid.setdefault(size, {})[length] = times
            progress.update()
            return times.per_token

        found = BatchLookupTable.profiled(seconds_per_token, most_rows, most_tokens)
    lengths = [s for s in range(1, long_draft + 1) if correct[s - 1] > 0]
    law = PowerLaw.fit(lengths, [correct[s - 1] for s in lengths]) if len(lengths) > 1 else None
    return Profile(found, grid, correct.tolist(), law)


def long_drafts(
    model: PreTrainedModel, config: SmartSpecConfig, prompts: Prompts, max_batch_size: int, length: int
) -> list[int]:
    """Return l_i, the number of correct tokens at the beginning of one draft of `length` tokens for each prompt."""
    policy = LongDraft(length)
    with Engine(model, replace(config, policy=policy), max_batch_size=max_batch_size) as engine:
        engine.generate([list(prompt) for prompt in prompts], max_new_tokens=length + 2, eos_token_id=None)
    return list(policy.accepted.values())


def decode_batch(
    model: PreTrainedModel, config: SmartSpecConfig, prompts: Prompts, batch_size: int, length: int, max_new_tokens: int
) -> Times:
    """
    Decode one batch of requests that begin together, with drafts of one length; prompts, which all run in the first
    step, are not counted.
    """
    chosen = [list(prompts[index % len(prompts)]) for index in range(batch_size)]
    config = replace(config, policy=BatchLookupTable({1: length}))
    with Engine(model, config, max_batch_size=batch_size, max_prefill_tokens=sum(map(len, chosen))) as engine:
        outputs = engine.generate(chosen, max_new_tokens=max_new_tokens, eos_token_id=None)
    counts = engine.statistics
    per_step = (counts.seconds_total - counts.seconds_prefill) / max(counts.forwards - 1, 1)
    return Times(float(np.mean([seconds_per_token(output) for output in outputs])), per_step)


def seconds_per_token(output: EngineOutput) -> float:
    """Return the seconds from a request's first token to its last, per token."""
    first = output.first_token_time or output.lifespan[0]
    return (output.lifespan[1] - first) / max(len(output.generated_tokens) - 1, 1)


def print_table(profile: Profile, console: Console) -> None:
    lengths = list(next(iter(profile.grid.values())))
    modelled, best = profile.modelled(), profile.table.lengths
    lines = table(
        "ms per token of a request; *: best length", "batch", *(f"s={s}" for s in lengths), "Eq. 12", num_text=0
    )
    for size, cells in profile.grid.items():
        marked = [f"{1e3 * cells[s].per_token:.2f}{'*' if s == best[size] else ' '}" for s in lengths]
        lines.add_row(str(size), *marked, f"{modelled[size]:.1f}" if modelled else "")
    console.print(lines)
    shown = [s for s in (1, 2, 4, 8, 16, 32, 64) if s <= len(profile.correct)]
    console.print("correct tokens l(s): " + ", ".join(f"{s}: {profile.correct[s - 1]:.2f}" for s in shown))
    if profile.law is not None:
        console.print(f"l(s) is about {profile.law.scale:.2f} * s ** {profile.law.exponent:.3f} (Eq. 5)\n")
