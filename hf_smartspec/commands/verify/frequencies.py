"""Test that speculative samples have the target's distribution: counted frequencies against exact probabilities."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.generation import SuppressTokensLogitsProcessor, TemperatureLogitsWarper

from ...drafts.tree import DraftTree
from ...generate import enabled
from ...prepare.config import SmartSpecConfig
from ..common.models import left_padded
from ..common.runs import Recorder, eos_ids
from .drafts import Drafting, SameTreeCandidates

NUM_CHOICES = 6  # tokens that the vocabulary is reduced to
TEMPERATURE = 1.5  # so that even a confident model has several outcomes
FALSE_ALARM = 1e-4  # a correct sampler has a smaller p-value in one check of ten thousand
_MIN_EXPECTED = 5.0  # rarer outcomes are counted together, as the chi-square approximation wants
_BATCH = 64


@dataclass(frozen=True)
class FrequencyCheck:
    """Counts of the outcomes of two sampled tokens against their probabilities."""

    drafts: str
    num_samples: int
    num_cells: int
    chi_square: float
    p_value: float
    distance: float  # total variation between frequencies and probabilities
    expected_distance: float  # what a perfect sampler has on average, with as many samples
    num_impossible: int  # outcomes of probability zero
    drafted_tokens: int
    accepted_tokens: int

    @property
    def is_consistent(self) -> bool:
        return self.p_value >= FALSE_ALARM and self.num_impossible == 0


@dataclass(frozen=True)
class ExactTable:
    """The reduced vocabulary of one prompt, and the probability of every pair of tokens."""

    prompt: list[int]
    suppressed: list[int]  # all tokens but the reduced vocabulary
    choices: list[int]
    pairs: torch.Tensor  # [choices, choices] float64

    def best_tree(self) -> DraftTree:
        """Return a draft that must sometimes be accepted, and sometimes not: half of the choices, with two children."""
        order = self.pairs.sum(dim=1).argsort(descending=True).tolist()[: max(len(self.choices) // 2, 1)]
        tokens: list[int] = []
        parents: list[int] = []
        probs: list[float] = []
        for first in order:
            root = len(tokens)
            seconds = self.pairs[first].argsort(descending=True).tolist()[:2]
            share = self.pairs[first] / self.pairs[first].sum().clamp(min=1e-12)
            tokens += [self.choices[first], *(self.choices[second] for second in seconds)]
            parents += [-1] + [root] * len(seconds)
            probs += [float(self.pairs[first].sum()), *(float(share[second]) for second in seconds)]
        return DraftTree(torch.tensor(tokens).numpy(), torch.tensor(parents).numpy(), torch.tensor(probs).numpy())


class _ForceFirst(LogitsProcessor):
    """Processor that forces the first token of row i to be `tokens[i]`."""

    def __init__(self, tokens: list[int]):
        self.tokens: list[int] | None = tokens

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if self.tokens is not None:
            for line, token in zip(scores, self.tokens):
                line.fill_(-torch.inf)
                line[token] = 0.0
            self.tokens = None
        return scores


def exact_table(model: PreTrainedModel, prompt: list[int]) -> ExactTable:
    """Return the probabilities of the first two sampled tokens, from the scores of plain `generate`."""
    first = _plain_scores(model, prompt, [])
    first[eos_ids(model)] = -torch.inf  # every sample shall have two tokens
    choices = sorted(first.topk(min(NUM_CHOICES, int((first > -torch.inf).sum()))).indices.tolist())
    suppressed = sorted(set(range(len(first))) - set(choices))
    rows = _plain_scores(model, prompt, choices, suppressed)
    starts = rows[0, 0].softmax(dim=-1)[choices]
    follows = rows[:, 1].softmax(dim=-1)[:, choices]
    return ExactTable(prompt, suppressed, choices, starts[:, None] * follows)


def _plain_scores(
    model: PreTrainedModel, prompt: list[int], starts: list[int], suppressed: list[int] | None = None
) -> torch.Tensor:
    """Return processed float64 scores: `[vocab_size]` of the first token, or `[starts, 2, vocab_size]` with starts."""
    recorder = Recorder()
    processors: list[LogitsProcessor] = [recorder]
    if starts:
        reduce = SuppressTokensLogitsProcessor(suppressed, device=str(model.device))
        processors = [reduce, TemperatureLogitsWarper(TEMPERATURE), recorder, _ForceFirst(starts)]
    inputs = left_padded([prompt] * max(len(starts), 1), 0, model.device)
    model.generate(
        **inputs, do_sample=False, max_new_tokens=2 if starts else 1, logits_processor=LogitsProcessorList(processors)
    )
    scores = torch.stack(recorder.scores, dim=1).double().cpu()
    return scores if starts else scores[0, 0]


def ways_of_sampling(assistant: str | PreTrainedModel, table: ExactTable) -> list[Drafting]:
    """Return a fixed tree for every model; for a draft model also chains, verified in both ways, and trees."""
    ways = [Drafting("fixed tree", lambda _: SameTreeCandidates(table.best_tree()))]
    if isinstance(assistant, PreTrainedModel):
        options: dict[str, dict[str, Any]] = {
            "chain": {"num_nodes": 3},
            "tree": {"num_nodes": 8, "width": 3},
            "chain by rejection": {"num_nodes": 3, "verification": "rejection"},
        }
        for name, values in options.items():
            ways.append(Drafting.with_config(f"draft {name}", SmartSpecConfig(assistant, **values)))
    return ways


def check_frequencies(
    model: PreTrainedModel, table: ExactTable, drafting: Drafting, num_samples: int, seed: int
) -> FrequencyCheck:
    """Sample pairs of tokens with `num_samples` seeds, and compare their frequencies with the table."""
    counts: Counter[tuple[int, ...]] = Counter()
    drafted = accepted = 0
    for start in range(0, num_samples, _BATCH):
        seeds = [seed + start + row for row in range(min(_BATCH, num_samples - start))]
        output = _sample(model, table, drafting.assistant([]), seeds)
        position = 1 if model.config.is_encoder_decoder else len(table.prompt)
        counts.update(map(tuple, output.sequences[:, position : position + 2].tolist()))
        statistics = getattr(output, "statistics", None)
        if statistics is not None:
            drafted += statistics.drafted_tokens
            accepted += statistics.accepted_tokens
    return _compare(table, counts, drafting.name, drafted, accepted)


def _sample(model: PreTrainedModel, table: ExactTable, assistant: Any, seeds: list[int]) -> Any:
    # A third token is drawn, but not counted, so that the second one is drafted too: the last one never is.
    with enabled(model):
        return model.generate(
            **left_padded([table.prompt] * len(seeds), 0, model.device),
            assistant=assistant,
            seed=seeds,
            do_sample=True,
            temperature=TEMPERATURE,
            top_k=0,
            top_p=1.0,
            suppress_tokens=table.suppressed,
            max_new_tokens=3,
            return_dict_in_generate=True,
        )


def _compare(table: ExactTable, counts: Counter, name: str, drafted: int, accepted: int) -> FrequencyCheck:
    size, num_samples = len(table.choices), sum(counts.values())
    probs = table.pairs.flatten()
    possible = {(table.choices[index // size], table.choices[index % size]): index for index in range(size * size)}
    observed = torch.zeros_like(probs)
    num_impossible = 0
    for pair, count in counts.items():
        index = possible.get(pair)
        if index is None or probs[index] == 0:
            num_impossible += count
        else:
            observed[index] += count
    expected = probs * num_samples
    chi_square, num_cells = _chi_square(observed, expected)
    return FrequencyCheck(
        name,
        num_samples,
        num_cells,
        chi_square,
        chi_square_p_value(chi_square, num_cells - 1),
        distance=float((observed / num_samples - probs).abs().sum() / 2),
        expected_distance=float((2 * probs * (1 - probs) / (math.pi * num_samples)).sqrt().sum() / 2),
        num_impossible=num_impossible,
        drafted_tokens=drafted,
        accepted_tokens=accepted,
    )


def _chi_square(observed: torch.Tensor, expected: torch.Tensor) -> tuple[float, int]:
    """Return Pearson's statistic and its number of cells; rare outcomes share one, with the rarest other if need be."""
    order = expected.argsort()
    observed, expected = observed[order], expected[order]
    num_rare = int((expected < _MIN_EXPECTED).sum())
    while 0 < num_rare < len(expected) and expected[:num_rare].sum() < _MIN_EXPECTED:
        num_rare += 1
    if num_rare:
        observed, expected = (
            torch.cat([item[:num_rare].sum()[None], item[num_rare:]]) for item in (observed, expected)
        )
    return float(((observed - expected) ** 2 / expected).sum()), len(expected)


def chi_square_p_value(statistic: float, degrees: int) -> float:
    """Return the probability that a chi-square variate with these degrees of freedom exceeds the statistic."""
    if degrees < 1:
        return 1.0
    halves = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))
