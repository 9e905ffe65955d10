"""
Texts and sources of `python -m benchmarks sources`: recorded requests split in two, and sources without some of their
parts.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from hf_smartspec.candidates import (
    DatastoreCandidates,
    FusedCandidates,
    SSSDCandidates,
    SuffixTreeCandidates,
    TreeCandidateGenerator,
)
from hf_smartspec.candidates.text.datastore.file import Datastore
from hf_smartspec.commands.common.arguments import UsageError
from hf_smartspec.commands.common.baselines import PIACandidates, rest
from hf_smartspec.commands.common.recordings import Fields, Recording, Texts, read_requests, tokenize
from hf_smartspec.commands.replay.sources import SourceSpec
from hf_smartspec.drafts.tree import DraftTree
from hf_smartspec.goodput import Calibrator

_PROMPT_TAIL = 8  # tokens of the prompt that suffix trees keep with an output
_MAX_MATCH = 16  # tokens that suffix trees look up
_ALPHAS = (0.5, 1, 2, 3, 4, 6)
_FIXED = (1, 2, 4, 8, 16, 32)
_MIN_PROBABILITIES = (0.8, 0.5, 0.2, 0.1, 0.05, 0.02)
_SIZES = (0, 10, 30, 100, 300, 1000, 3000, 10_000)
_MOST_NODES = 64  # where the ablation is about the number of nodes: a bound that is hardly met
_SSSD_NODES = 16


class Split(NamedTuple):
    """One file: the requests that are replayed, and those that came before."""

    name: str
    earlier: list[Recording]
    replayed: list[Recording]
    texts: list[Texts]  # of the replayed ones

    @property
    def outputs(self) -> list[np.ndarray]:
        """The earlier outputs as suffix trees keep them, each with the end of its prompt."""
        return [_kept(*recording) for recording in self.earlier]


def read_splits(
    paths: Sequence[Path], limit: int, num_earlier: int, tokenizer: PreTrainedTokenizerBase, max_prompt: int = 2048
) -> list[Split]:
    """
    Return the first `num_earlier + limit` requests of every file: the last `limit` are replayed, or half of them all
    where there are too few.

    Raises:
        UsageError: for files that cannot be read, hold fewer than two responses with tokens, or are named twice.
    """
    names = [path.name.removesuffix(".gz").removesuffix(".jsonl") for path in paths]
    if len(set(names)) < len(names):
        raise UsageError(f"two files have the same name in {' '.join(map(str, paths))}: give each data set one file")
    texts = {name: read_requests(path, Fields(), limit + num_earlier) for name, path in zip(names, paths)}
    splits = []
    for name, requests in texts.items():
        usable = _with_tokens(requests, tokenizer)
        if len(usable) < 2:
            raise UsageError(
                f"{name!r} holds {len(usable)} responses that have tokens; some are needed to learn from and some to "
                "replay"
            )
        recordings = tokenize(usable, tokenizer, max_prompt)
        count = min(limit, len(recordings) // 2)
        splits.append(Split(name, recordings[:-count], recordings[-count:], usable[-count:]))
    return splits


def _with_tokens(requests: Sequence[Texts], tokenizer: PreTrainedTokenizerBase) -> list[Texts]:
    """Return the requests that `tokenize` keeps, so that texts and recordings correspond."""
    responses = [request.response for request in requests]
    ids = tokenizer(responses, add_special_tokens=False, verbose=False).input_ids
    return [request for request, tokens in zip(requests, ids) if len(tokens)]


def _kept(prompt: np.ndarray, response: np.ndarray) -> np.ndarray:
    return np.concatenate([prompt[-_PROMPT_TAIL:], response])


def suffix_trees(outputs: Iterable[np.ndarray] = (), **options: Any) -> SuffixTreeCandidates:
    """Return suffix trees that know some outputs from the beginning."""
    source = SuffixTreeCandidates(max_match=_MAX_MATCH, **options)
    source.add_outputs(outputs, progress=False)
    return source


def published_trees(outputs: Iterable[np.ndarray] = (), alpha: float = 4.0) -> SuffixTreeCandidates:
    """Return SuffixDecoding as published, with some outputs in the global tree from the beginning."""
    source = SuffixTreeCandidates.published(alpha)
    source.add_outputs(outputs, progress=False)
    return source


class GlobalTreeOnly(TreeCandidateGenerator):
    """
    Suffix decoding without the request's own tree: before every draft the request begins anew, with nothing but the
    tokens that are looked up. A repetition within these is all that is left of its own text.

    Args:
        outputs (iterable of `np.ndarray`, int): Outputs in the global tree from the beginning.
        keep_outputs (`bool`): Whether outputs join it.
    """

    def __init__(self, outputs: Iterable[np.ndarray] = (), keep_outputs: bool = True):
        self._trees, self._keep_outputs = suffix_trees(outputs, keep_outputs=False), keep_outputs
        self.default_num_nodes = self._trees.default_num_nodes
        self._texts: dict[Hashable, list[np.ndarray]] = {}  # the prompt, then what was committed

    def start(self, request_id: Hashable, prompt: np.ndarray) -> None:
        self._texts[request_id] = [prompt]
        self._trees.start(request_id, prompt[-_MAX_MATCH:])

    def propose(self, request_ids: Sequence[Hashable], max_nodes: Sequence[int]) -> list[DraftTree]:
        return self._trees.propose(request_ids, max_nodes)

    def observe(self, request_id: Hashable, tokens: np.ndarray) -> None:
        self._trees.observe(request_id, tokens)
        self._trees.stop(request_id)
        texts = self._texts[request_id]
        texts.append(tokens)
        self._trees.start(request_id, np.concatenate([texts[0][-_MAX_MATCH:], *texts[1:]])[-_MAX_MATCH:])

    def stop(self, request_id: Hashable) -> None:
        self._trees.stop(request_id)
        texts = self._texts.pop(request_id, [])
        if self._keep_outputs and len(texts) > 1:
            self._trees.add_outputs([_kept(texts[0], np.concatenate(texts[1:]))], progress=False)

    def warm_up(self) -> None:
        self._trees.warm_up()


# What is compared in each ablation: `name` is the series and `text` the setting.


def tree_settings(split: Split) -> list[SourceSpec]:
    """
    Return the global tree, the request's own, and both; `neither` has the last `_MAX_MATCH` tokens, which `global` has
    too.
    """
    outputs = split.outputs
    return [
        SourceSpec("neither", "trees", partial(GlobalTreeOnly, keep_outputs=False), None),
        SourceSpec("per request", "trees", partial(suffix_trees, keep_outputs=False), None),
        SourceSpec("global", "trees", partial(GlobalTreeOnly, outputs), None),
        SourceSpec("both", "trees", partial(suffix_trees, outputs), None),
    ]


def length_settings(split: Split) -> list[SourceSpec]:
    """
    Return draft lengths: alpha times the match length of up to 16 tokens, or as published; a fixed number of nodes; or
    down to a learnt path probability.
    """
    known = partial(suffix_trees, split.outputs)
    counted = partial(known, scoring="counts", min_probability=0.0)
    series = {
        "alpha": {f"{alpha:g}": partial(counted, factor=alpha) for alpha in _ALPHAS},
        "published": {f"{alpha:g}": partial(published_trees, split.outputs, alpha) for alpha in _ALPHAS},
        "fixed": {str(size): partial(counted, factor=0.0, offset=float(size)) for size in _FIXED},
        "learned": {f"{least:g}": partial(known, min_probability=least) for least in _MIN_PROBABILITIES},
    }
    return [
        SourceSpec(setting, name, build, None if name == "published" else _MOST_NODES)
        for name, settings in series.items()
        for setting, build in settings.items()
    ]


def size_settings(split: Split) -> list[SourceSpec]:
    """
    Return trees of more and more of the earlier outputs, drawn at random, each set within the next; nothing is added.
    """
    outputs, order = split.outputs, np.random.default_rng(0).permutation(len(split.earlier))
    return [
        SourceSpec(
            str(size),
            "size",
            partial(suffix_trees, [outputs[index] for index in sorted(order[:size])], keep_outputs=False),
            None,
        )
        for size in _SIZES
        if size <= len(outputs)
    ]


def datastore_settings(split: Split) -> list[SourceSpec]:
    """
    Return SSSD's two sources, calibrated, alone and together, with the same number of nodes for all; and as published,
    beside the sources that the paper compares with, which know the same earlier outputs.
    """
    outputs = [response for _, response in split.earlier]
    store = Datastore.from_documents(outputs)

    def build(*names: str) -> TreeCandidateGenerator:
        sources: dict[str, TreeCandidateGenerator] = {
            "own text": suffix_trees(keep_outputs=False, min_probability=0.0),
            "datastore": DatastoreCandidates(store),
        }
        return FusedCandidates([sources[name] for name in names], calibrator=Calibrator(), min_probability=0.0)

    def pia() -> PIACandidates:
        source = PIACandidates()
        source.add_outputs(outputs)
        return source

    settings = {"own text": ("own text",), "datastore": ("datastore",), "both": ("own text", "datastore")}
    builders: dict[str, Callable[[], TreeCandidateGenerator]] = {
        **{text: partial(build, *names) for text, names in settings.items()},
        **{"SSSD": partial(SSSDCandidates, store), "REST": partial(rest, store), "PIA": pia},
    }
    return [SourceSpec(text, "sources", builder, _SSSD_NODES) for text, builder in builders.items()]


def sampled_settings(split: Split, temperature: float) -> list[SourceSpec]:
    """Return SSSD as published, and suffix trees, both with the earlier outputs, for answers of a temperature."""
    store = Datastore.from_documents([response for _, response in split.earlier])
    builders: dict[str, Callable[[], TreeCandidateGenerator]] = {
        "SSSD": partial(SSSDCandidates, store),
        "suffix trees": partial(suffix_trees, split.outputs),
    }
    return [SourceSpec(f"{temperature:g}", name, build, _SSSD_NODES) for name, build in builders.items()]
