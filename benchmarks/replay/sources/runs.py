"""Measurements of `benchmarks sources`: replays, a shift of the workload, and what needs a model."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_smartspec.candidates import DraftModelCandidates, StagedCandidates, SuffixTreeCandidates, TreeCandidateGenerator
from hf_smartspec.commands.common.arguments import UsageError
from hf_smartspec.commands.common.models import encode, left_padded, load_draft, load_model, load_tokenizer
from hf_smartspec.commands.common.recordings import Recording
from hf_smartspec.commands.common.runs import eos_ids, pad_id, up_to_end
from hf_smartspec.commands.replay.curves import moving_average
from hf_smartspec.commands.replay.loop import Replayer, Results, Tally, replay
from hf_smartspec.commands.replay.sources import SourceSpec
from hf_smartspec.drafts.price import LevelPrice
from hf_smartspec.drafts.tree import DraftTree
from hf_smartspec.target_model.compat import CACHE, cache_name

from ...kit.session import Case
from .claims import Numbers, Series
from .sources import Split, published_trees, sampled_settings, suffix_trees

_WINDOW = 25  # requests
_REQUESTS_BEHIND_SHIFT = 5  # times as many as are replayed before it: adapting takes its time

_HYBRID_PROMPTS = 12
_HYBRID_PROMPT_LEN, _HYBRID_NEW_TOKENS = 256, 96
_HYBRID_LETTERS = 8 * _HYBRID_PROMPT_LEN  # of a prompt, its end: more than are needed
_TEMPERATURES, _NUCLEUS = (0.0, 0.5, 1.0, 2.0), {"top_k": 50, "top_p": 0.7}  # as in SSSD, section 4.2
_TAUS = (0.0, 0.5, 1.0, 2.0, 4.0)
_CHAIN_NODES, _NUM_BINS = 5, 10  # of drafts whose confidences are counted


class Workload(NamedTuple):
    """Texts and models of the ablations."""

    splits: list[Split]
    models: Path | None  # a folder with `target` and `draft`


def replay_settings(settings: Callable[[Split], list[SourceSpec]], workload: Workload) -> Iterator[Case]:
    """Yield every data set, replayed with all settings side by side."""
    for split in workload.splits:
        yield _case(split.name, partial(_replay, split.replayed, settings(split)))


def _case(name: str, measure: Callable[[], Series]) -> Case:
    return Case(name, lambda: {"figures": measure()})


def _replay(recordings: Sequence[Recording], specs: Sequence[SourceSpec]) -> Series:
    results: Results = {}
    replay({"": recordings}, specs, results)
    series: Series = {}
    for spec, tally in results[""].items():
        numbers = tally.summary()
        median, drafted = numbers["propose_us_per_call_median"], numbers["drafted_per_step"]
        numbers["us_per_node"] = median / drafted if median and drafted else None  # the mean is that of a few stalls
        series.setdefault(spec.name, {})[spec.text] = numbers
    return series


# --- Shift of the workload (SuffixDecoding, appendix A.2) -------------------------------------------------------------


def shifts(workload: Workload) -> Iterator[Case]:
    """
    Yield the shifts from each data set to the next one. Trees that know the first one's earlier outputs serve its
    replayed requests, then those of the second: `kept` goes on learning, `frozen` keeps no outputs after the shift, and
    `fresh` begins there, knowing nothing.
    """
    for before, after in pairwise(workload.splits):
        requests = [*after.earlier, *after.replayed][-_REQUESTS_BEHIND_SHIFT * len(before.replayed) :]
        yield _case(f"{before.name} > {after.name}", partial(_shift, before, requests))


def _shift(before: Split, requests: list[Recording]) -> Series:
    sources = {"kept": suffix_trees(before.outputs), "frozen": suffix_trees(before.outputs), "fresh": suffix_trees()}
    half = len(requests) // 2
    series: dict[str, dict[str, Numbers]] = {name: {} for name in ("before", "first half", "second half", "means")}
    _run(sources["frozen"], before.replayed)
    tally = _run(sources["kept"], before.replayed)  # the same until then
    series["before"]["kept"] = tally.summary()
    series["means"]["before"] = {"moving_mean": _moving_mean(tally)}
    sources["frozen"].keep_outputs = False
    for name, source in sources.items():
        halves = [_run(source, requests[:half]), _run(source, requests[half:])]
        series["first half"][name], series["second half"][name] = (tally.summary() for tally in halves)
        series["means"][name] = {"moving_mean": _moving_mean(*halves)}
    return series


def _moving_mean(*tallies: Tally) -> list[float]:
    means: list[float] = moving_average(np.concatenate([tally.requests for tally in tallies]), _WINDOW).tolist()
    return means


def _run(source: SuffixTreeCandidates, recordings: Sequence[Recording]) -> Tally:
    tally = Tally.of(len(recordings))
    for _ in Replayer(source).run(recordings, tally):
        pass
    return tally


# --- Suffix trees and a draft model (SuffixDecoding, appendix B.1) ----------------------------------------------------


def hybrids(workload: Workload) -> Iterator[Case]:
    """
    Yield replays of the target's own answers to some of the prompts, with suffix trees that begin empty, with its draft
    model, and with both at several thresholds. The draft model really runs. `speed_up` takes the measured seconds of
    drafting, and verification as one forward of the target over one token.
    """
    if workload.models is None:
        return
    target, draft, tokenizer = load_pair(workload.models)
    for split in workload.splits:
        yield _case(split.name, partial(_hybrid, target, draft, tokenizer, split))


def _hybrid(
    target: PreTrainedModel, draft: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, split: Split
) -> Series:
    recordings = _answers(target, tokenizer, split, 0.0)
    seconds = _step_seconds(target, recordings[0])
    series = _replay(recordings, _hybrid_settings(draft))
    for numbers in [numbers for settings in series.values() for numbers in settings.values()]:
        drafting = (numbers["propose_us_per_step"] or 0.0) / 1e6
        numbers["target_us_per_step"] = seconds * 1e6
        numbers["speed_up"] = numbers["tokens_per_step"] * seconds / (seconds + drafting)
    return series


def load_pair(models: Path) -> tuple[PreTrainedModel, PreTrainedModel, PreTrainedTokenizerBase]:
    """
    Load the models of the folders `target` and `draft`, and the target's tokenizer.

    Raises:
        UsageError: unless both are there, with a tokenizer.
    """
    target = load_model(str(models / "target"))
    draft = load_draft(str(models / "draft"), target)
    tokenizer = load_tokenizer(str(models / "target"))
    if tokenizer is None:
        raise UsageError(f"cannot load a tokenizer from {str(models / 'target')!r}")
    return target, draft, tokenizer


@torch.no_grad()
def _answers(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, split: Split, temperature: float
) -> list[Recording]:
    """Return the target's own answers, greedy at temperature 0, as recordings."""
    texts = ["\n".join(request.context)[-_HYBRID_LETTERS:] for request in split.texts[:_HYBRID_PROMPTS]]
    prompts = encode(texts, tokenizer, _HYBRID_PROMPT_LEN)
    padding, ends = pad_id(target), eos_ids(target)
    inputs = left_padded(prompts, padding, target.device)
    sampling = {"do_sample": True, "temperature": temperature, **_NUCLEUS} if temperature else {"do_sample": False}
    torch.manual_seed(0)
    outputs: Any = target.generate(
        **inputs, **sampling, max_new_tokens=_HYBRID_NEW_TOKENS, pad_token_id=padding, eos_token_id=ends
    )
    answers = [up_to_end(row, set(ends)) for row in outputs[:, inputs["input_ids"].shape[1] :].tolist()]
    return [
        Recording(np.array(prompt, np.int64), np.array(answer, np.int64)) for prompt, answer in zip(prompts, answers)
    ]


@torch.no_grad()
def _step_seconds(target: PreTrainedModel, recording: Recording, num_steps: int = 32) -> float:
    """Return the median seconds of a forward over one token, after a prompt."""
    ids = torch.tensor(recording.prompt[None], device=target.device)
    cache = {cache_name(target.forward): target(ids, use_cache=True)[CACHE]}
    seconds = []
    for _ in range(num_steps):
        start = perf_counter()
        target(ids[:, -1:], **cache, use_cache=True)
        seconds.append(perf_counter() - start)
    return float(np.median(seconds))


class ShortDrafts(DraftModelCandidates):
    """Chains of the model's default length, also where a source that costs nothing may propose more nodes."""

    def propose(
        self, request_ids: Sequence[Hashable], max_nodes: Sequence[int], price: LevelPrice | None = None
    ) -> list[DraftTree]:
        return super().propose(request_ids, [min(limit, self.default_num_nodes) for limit in max_nodes], price)


def _hybrid_settings(draft: PreTrainedModel) -> list[SourceSpec]:
    def hybrid(threshold: float | None) -> TreeCandidateGenerator:
        return StagedCandidates([suffix_trees(), ShortDrafts(draft)], threshold=threshold)

    def published(threshold: float) -> TreeCandidateGenerator:
        return StagedCandidates([published_trees(), ShortDrafts(draft)], threshold, replaces=True)

    builders: dict[str, Callable[[], TreeCandidateGenerator]] = {"suffix": suffix_trees}
    builders |= {f"{tau:g}": partial(hybrid, tau) for tau in _TAUS}
    builders |= {"learned": partial(hybrid, None), "draft": partial(ShortDrafts, draft)}
    specs = [SourceSpec(text, "tau", build, None) for text, build in builders.items()]
    return specs + [SourceSpec(f"{tau:g}", "published", partial(published, tau), None) for tau in _TAUS]


# --- Sampled answers (SSSD, section 4.2) ------------------------------------------------------------------------------


def temperatures(workload: Workload) -> Iterator[Case]:
    """
    Yield replays of the target's own answers at several temperatures: the target samples, and a draft is accepted as
    far as it holds the sampled tokens.
    """
    if workload.models is None:
        return
    target, _, tokenizer = load_pair(workload.models)
    for split in workload.splits:
        yield _case(split.name, partial(_sampled, target, tokenizer, split))


def _sampled(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, split: Split) -> Series:
    series: dict[str, dict[str, Numbers]] = {}
    for temperature in _TEMPERATURES:
        replayed = _replay(_answers(target, tokenizer, split, temperature), sampled_settings(split, temperature))
        for name, settings in replayed.items():
            series.setdefault(name, {}).update(settings)
    return series


# --- Confidence of a draft model (SmartSpec, Figure 17) ---------------------------------------------------------------


def confidences(workload: Workload) -> Iterator[Case]:
    """Yield how the probabilities that the draft model gives its tokens are distributed, by whether these are right."""
    if workload.models is None:
        return
    target, draft, tokenizer = load_pair(workload.models)
    for split in workload.splits:
        yield _case(split.name, partial(_of_answers, target, draft, tokenizer, split))


def _of_answers(
    target: PreTrainedModel, draft: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, split: Split
) -> Series:
    return _confidences(draft, _answers(target, tokenizer, split, 0.0))


def _confidences(draft: PreTrainedModel, recordings: Sequence[Recording]) -> Series:
    counts, source = np.zeros((2, _NUM_BINS)), DraftModelCandidates(draft, _CHAIN_NODES, width=1)
    for prompt, rest in recordings:
        source.start("", prompt)
        while len(rest):
            (tree,) = source.propose([""], [_CHAIN_NODES])
            num_right = len(tree.path_along(rest))
            for node in range(min(num_right + 1, len(tree), len(rest))):
                counts[int(node < num_right), min(int(tree.probs[node] * _NUM_BINS), _NUM_BINS - 1)] += 1
            source.observe("", rest[: num_right + 1])
            rest = rest[num_right + 1 :]
        source.stop("")
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    return {
        name: {
            f"{first / _NUM_BINS:.1f}": {"share": share, "count": count} for first, (share, count) in enumerate(line)
        }
        for name, line in (
            ("rejected", zip(shares[0].tolist(), counts[0].tolist())),
            ("accepted", zip(shares[1].tolist(), counts[1].tolist())),
        )
    }
