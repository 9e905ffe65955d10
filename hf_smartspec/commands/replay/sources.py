"""Candidate sources of `smartspec replay`, by specification: a name or a class with options."""

import ast
import importlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from transformers.generation import PromptLookupCandidateGenerator

from ...candidates import (
    Datastore,
    DatastoreCandidates,
    FusedCandidates,
    PromptLookupCandidates,
    SSSDCandidates,
    StagedCandidates,
    SuffixTreeCandidates,
    TreeCandidateGenerator,
    WrappedCandidates,
)
from ...candidates.combined.tuned import TunedSource, TunedSources
from ...drafts.tree import DraftTree
from ...goodput import Calibrator
from ..common.arguments import UsageError, usage_errors
from ..common.baselines import PIACandidates, rest


class SourceSpec(NamedTuple):
    """A source under one setting."""

    text: str  # the specification, for tables
    name: str  # without options: the settings of one name make one curve
    build: Callable[[], TreeCandidateGenerator]
    num_nodes: int | None  # nodes per row and step; None: the source's own default


class ArcticCandidates(TreeCandidateGenerator):
    """
    ArcticInference's suffix cache (SuffixDecoding's own implementation, C++) as a source to compare with.

    Args:
        factor, offset (`float`): Bound on the nodes: `factor * match length + offset`.
        max (`int`): Nodes per step by default.
        tree (`bool`): Whether to draft trees in place of chains.
        prob (`float`): Least path probability of a node.
        depth (`int`): Longest sequence in its trees, which bounds the match length.
        requests (`int`): Number of responses that are kept; -1: all.

    Raises:
        UsageError: if `arctic_inference.suffix_decoding` cannot be imported.
    """

    def __init__(
        self,
        factor: float = 1.0,
        offset: float = 0.0,
        max: int = 16,  # the option's name on the command line
        tree: bool = False,
        prob: float = 0.1,
        depth: int = 64,
        requests: int = -1,
    ):
        try:
            module = importlib.import_module("arctic_inference.suffix_decoding")
        except ImportError as error:
            raise UsageError(
                f"the source 'arctic' needs ArcticInference's suffix decoding ({error}): pip install arctic-inference, "
                "or build its csrc/suffix_decoding alone and put it on PYTHONPATH"
            ) from error
        self._cache = module.SuffixDecodingCache(max_tree_depth=depth, max_cached_requests=requests)
        self.default_num_nodes, self.depth = int(max), depth
        self._options = {
            "max_spec_factor": float(factor),
            "max_spec_offset": float(offset),
            "min_token_prob": float(prob),
            "use_tree_spec": bool(tree),
        }
        self._contexts: dict[Hashable, np.ndarray] = {}  # the last `depth` tokens: it looks at no more
        self._num_tokens = 0

    def start(self, request_id: Hashable, prompt: np.ndarray) -> None:
        tokens = prompt.astype(np.int32)
        self._cache.start_request(request_id, tokens)
        self._contexts[request_id] = tokens[-self.depth :]

    def propose(self, request_ids: Sequence[Hashable], max_nodes: Sequence[int]) -> list[DraftTree]:
        return [self._propose(name, limit) for name, limit in zip(request_ids, max_nodes)]

    def _propose(self, request_id: Hashable, limit: int) -> DraftTree:
        draft = self._cache.speculate(
            request_id, self._contexts[request_id], max_spec_tokens=int(limit), **self._options
        )
        if not draft.token_ids:
            return DraftTree.empty()
        # Its probabilities are those of whole paths.
        paths, parents = np.array([*draft.probs, 1.0]), np.array(draft.parents, np.int64)
        probs = (paths[:-1] / paths[parents]).astype(np.float32)
        return DraftTree.of(np.array(draft.token_ids, np.int64), parents, probs, draft.match_len)

    def observe(self, request_id: Hashable, tokens: np.ndarray) -> None:
        tokens = tokens.astype(np.int32)
        self._cache.add_active_response(request_id, tokens)
        self._contexts[request_id] = np.concatenate([self._contexts[request_id], tokens])[-self.depth :]
        self._num_tokens += len(tokens)

    def stop(self, request_id: Hashable) -> None:
        if self._contexts.pop(request_id, None) is not None:
            self._cache.stop_request(request_id)

    def num_bytes(self) -> int:
        # Its estimate counts 24 bytes (a vector's own size) per stored token id instead of the 4 that it takes.
        return self._cache._global_tree.estimate_memory() - 20 * self._num_tokens

    def num_cached_tokens(self) -> int:
        return self._num_tokens


def hf_prompt_lookup(num_tokens: int = 10, max_ngram: int = 2) -> WrappedCandidates:
    """Return transformers' own prompt lookup, by default with its own options."""
    generator = PromptLookupCandidateGenerator(
        num_output_tokens=num_tokens, max_matching_ngram_size=max_ngram, max_length=2**31
    )
    return WrappedCandidates(generator)


def fused(*names: str) -> FusedCandidates:
    """Return the named sources, fused and calibrated: "fused:suffix,prompt_lookup"."""
    for name in names:
        if name not in SOURCES:
            raise UsageError(f"unknown source {name!r} in a fused one; known are {', '.join(SOURCES)}")
    return FusedCandidates([SOURCES[name]() for name in names], calibrator=Calibrator())


def tuned(path: str) -> TreeCandidateGenerator:
    """Return the sources in a file of `smartspec tune`: "tuned:PATH"."""
    return build_tuned(TunedSources.load(path))


def build_tuned(tuned: TunedSources, drafter: TreeCandidateGenerator | None = None) -> TreeCandidateGenerator:
    """
    Return new tuned sources, followed by a draft model if there is one; raises `ValueError` or `TypeError` for options
    that do not fit, each other or the datastore.
    """
    sources = [_built(source) for source in tuned.sources]
    options = dict(tuned.fused)
    threshold, is_calibrated = options.pop("threshold", None), options.pop("calibrated", True)
    cheap = sources[0]
    if len(sources) > 1 or (drafter is not None and options):
        cheap = FusedCandidates(sources, calibrator=Calibrator() if is_calibrated else None, **options)
    return cheap if drafter is None else StagedCandidates([cheap, drafter], threshold)


def _built(source: TunedSource) -> TreeCandidateGenerator:
    if path := source.options.get("datastore"):
        source = replace(source, options={**source.options, "datastore": _opened(path)})
    return source.build()


@lru_cache(maxsize=4)
def _opened(path: str) -> Datastore:
    return Datastore.open(path)


# Names for the command line only; a source of one's own is named by its class, "module:Class(option=value)".
SOURCES: dict[str, Callable[..., TreeCandidateGenerator]] = {
    "prompt_lookup": PromptLookupCandidates,
    "pld": PromptLookupCandidates.published,
    "suffix": SuffixTreeCandidates,
    "suffix_decoding": SuffixTreeCandidates.published,
    "datastore": DatastoreCandidates,
    "hf_prompt_lookup": hf_prompt_lookup,
    "fused": fused,
    "tuned": tuned,
    "arctic": ArcticCandidates,
    "pia": PIACandidates,
    "rest": rest,
    "sssd": SSSDCandidates,
}


def parse_specs(text: str) -> list[SourceSpec]:
    """
    Return the sources of a specification, "NAME[:VALUE,OPTION=VALUE,...][@NODES,...]" or "MODULE:CLASS[(OPTION=VALUE,
    ...)][@NODES,...]", one for every number of nodes. Raises `UsageError` for an unknown name, options that cannot be
    read, or a class that cannot be imported.
    """
    body, _, numbers = text.partition("@")
    name, _, options = body.partition(":")
    if name in SOURCES:
        build = _factory(SOURCES[name], *plain_options(options), text)
    elif options:
        path, _, call = options.partition("(")
        name = path
        build = _factory(_imported(body.partition("(")[0]), *_call_options(call, text), text)
    else:
        raise UsageError(f"unknown source {text!r}; known are {', '.join(SOURCES)} and MODULE:CLASS(OPTION=VALUE, ...)")
    if not numbers:
        return [SourceSpec(text, name, build, None)]
    return [SourceSpec(f"{body}@{number}", name, build, number) for number in _node_counts(numbers, text)]


def _node_counts(numbers: str, text: str) -> list[int]:
    try:
        counts = [int(number) for number in numbers.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise UsageError(f"the numbers of nodes after '@' must be positive, in {text!r}")
    return counts


def plain_options(options: str) -> tuple[list[Any], dict[str, Any]]:
    """Return options such as "4,factor=2,path=a/b" as arguments; values that are no Python literals are text."""
    values: list[Any] = []
    named: dict[str, Any] = {}
    for part in filter(None, options.split(",")):
        key, separator, value = part.partition("=")
        if separator and key.strip().isidentifier():
            named[key.strip()] = _literal(value.strip())
        else:
            values.append(_literal(part.strip()))
    return values, named


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return {"true": True, "false": False}.get(text, text)


def _call_options(call: str, text: str) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a Python call from the text after its opening bracket, such as "1, option=2)"."""
    remedy = f"cannot read the options of {text!r}: write MODULE:CLASS(OPTION=VALUE, ...)"
    with usage_errors(remedy, ValueError, SyntaxError):
        tree = ast.parse(f"f({call or ')'}", mode="eval").body
        if not isinstance(tree, ast.Call):
            raise ValueError("no call")
        named = {str(item.arg): ast.literal_eval(item.value) for item in tree.keywords}
        return [ast.literal_eval(item) for item in tree.args], named


def _imported(path: str) -> Callable[..., TreeCandidateGenerator]:
    module, _, name = path.partition(":")
    with usage_errors(f"cannot import the source {path!r}", ImportError, AttributeError, ValueError):
        found: Callable[..., TreeCandidateGenerator] = getattr(importlib.import_module(module), name)
    return found


def _factory(
    make: Callable[..., TreeCandidateGenerator], values: list[Any], named: dict[str, Any], text: str
) -> Callable[[], TreeCandidateGenerator]:
    def build() -> TreeCandidateGenerator:
        with usage_errors(f"cannot make the source {text!r}"):
            return make(*values, **named)

    return build
