"""
Kinds of drafters for random requests. Each agrees with the target at times, but not always: drafts are accepted, partly
accepted and rejected. A further kind is one more entry of `KINDS`.
"""

import copy
import random
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from hf_smartspec import (
    BlockCandidates,
    BlockDrafter,
    DraftModelCandidates,
    EarlyExitCandidates,
    MedusaCandidates,
    MedusaHeads,
    MtpLayers,
    PromptLookupCandidates,
    RoutedCandidates,
    SuffixTreeCandidates,
    TreeCandidateGenerator,
)
from hf_smartspec.candidates import ParallelCandidates, SSSDCandidates, TokenRecyclingCandidates
from hf_smartspec.candidates.heads.eagle.heads import EagleHeads
from hf_smartspec.candidates.heads.feature_source import FeatureCandidates
from hf_smartspec.candidates.heads.learned import LearnedDrafter
from hf_smartspec.candidates.heads.mlp_speculator import MLPSpeculator, MLPSpeculatorCandidates
from hf_smartspec.candidates.models.translated.source import TranslatedDraftCandidates
from hf_smartspec.candidates.models.translated.translation import Translation
from hf_smartspec.goodput import Calibrator

from ..candidates.heads.fitted import fitted_blocks, fitted_eagle, fitted_heads, fitted_parallel, fitted_speculator
from ..candidates.models.translated.pairs import with_tokens_of
from ..models import VOCAB_SIZE
from .targets import ARCHITECTURES, NUM_MTP_LAYERS, STREAMS, WRITTEN, known_mtp, known_texts, noisy_target, target
from .tokenizers import PAIRS, WHOLE, first_letters

_TREE = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]


class Kind(NamedTuple):
    """
    Args:
        make (`Callable`): A new source for the shared model of an architecture.
        swap (`Callable`, *optional*): Changes the drafter's weights where they are, while requests run.
        architectures (sequence of `str`): Of the targets that it drafts for.
    """

    make: Callable[[str, random.Random], TreeCandidateGenerator]
    swap: Callable[[Any, random.Random], None] | None = None
    architectures: Sequence[str] = ARCHITECTURES


def draft_model(architecture: str, rng: random.Random) -> TreeCandidateGenerator:
    """A copy of the target with noise on its weights."""
    return DraftModelCandidates(copy.deepcopy(noisy_target(architecture)), width=rng.choice((None, 1, 3)))


def translated(architecture: str, rng: random.Random) -> TreeCandidateGenerator:
    """A draft model whose tokenizer numbers characters otherwise, lacks some, and joins others than the target's."""
    own, other = rng.choice(PAIRS)
    size = len(other) + rng.choice((0, 7))
    draft = with_tokens_of(noisy_target(architecture), own, other, size)
    return TranslatedDraftCandidates(draft, Translation(own, other, VOCAB_SIZE, size), width=rng.choice((None, 1, 3)))


def other_size(architecture: str, rng: random.Random) -> TreeCandidateGenerator:
    """A draft model that lacks the target's last tokens, or has some more."""
    size = VOCAB_SIZE + rng.choice((-12, -1, 1, 9))
    draft = with_tokens_of(noisy_target(architecture), WHOLE, first_letters(size), size)
    return DraftModelCandidates(draft, width=rng.choice((None, 1, 3)))


def swap_draft_model(source: DraftModelCandidates, rng: random.Random) -> None:
    shake(source.model.parameters(), rng)
    source.weights_version += 1


def medusa(architecture: str, rng: random.Random) -> TreeCandidateGenerator:
    heads = copied(known_heads(architecture))
    return MedusaCandidates(heads, tree=rng.choice((None, _TREE)), calibrator=rng.choice((None, Calibrator())))


def mlp_speculator(architecture: str, rng: random.Random) -> TreeCandidateGenerator:
    heads = copied(known_speculator(architecture))
    return MLPSpeculatorCandidates(heads, width=rng.choice((None, 1, 3)))


def eagle(architecture: str, rng: random.Random) -> TreeCandidateGenerator:
    return FeatureCandidates(copied(known_eagle(architecture)), width=rng.choice((None, 1, 3)))


def peagle(architecture: str, rng: random.Random) -> TreeCandidateGenerator:
    heads = copied(known_peagle(architecture))
    return ParallelCandidates(heads, width=rng.choice((None, 1)), calibrator=rng.choice((None, Calibrator())))


def blocks(kind: str, architecture: str, rng: random.Random) -> TreeCandidateGenerator:
    heads = copied(known_blocks(architecture, kind, rng.randrange(len(_BLOCKS[kind]))))
    return BlockCandidates(heads, width=rng.choice((None, 1, 3)))


def mtp(architecture: str, rng: random.Random) -> TreeCandidateGenerator:
    model = known_mtp(architecture).packed.model
    shared = [model.embed_tokens, model.shared_head, model.rotary_emb]
    layers = MtpLayers(copy.deepcopy(model, {id(part): part for part in shared}))
    return FeatureCandidates(layers, width=rng.choice((None, 1, 3)))


def early_exit(architecture: str, rng: random.Random) -> TreeCandidateGenerator:
    return EarlyExitCandidates(target(architecture), 1, width=rng.choice((None, 1, 3)))


def swap_heads(source: Any, rng: random.Random) -> None:
    shake(source.heads.parameters(), rng)


def routed(architecture: str, rng: random.Random) -> TreeCandidateGenerator:
    """Three drafters, of which the prompt's tokens choose one; with a fourth, for which no prompt asks."""
    makes = {"draft model": draft_model, "eagle": eagle, "suffix": suffix, "medusa": medusa}
    names = list(makes)
    sources = {name: make(architecture, rng) for name, make in makes.items()}
    return RoutedCandidates(sources, lambda prompt: names[int(prompt.sum()) % 3])


def swap_routed(source: RoutedCandidates, rng: random.Random) -> None:
    swap_draft_model(source.drafters["draft model"], rng)
    swap_heads(source.drafters["eagle"], rng)


def suffix(architecture: str, rng: random.Random) -> TreeCandidateGenerator:
    """Suffix trees, or what its papers published."""
    usual = SuffixTreeCandidates(max_bytes=2**20, min_probability=0.02)
    return rng.choice((usual, SuffixTreeCandidates.published(max_bytes=2**20), TokenRecyclingCandidates()))


def prompt_lookup(architecture: str, rng: random.Random) -> TreeCandidateGenerator:
    return rng.choice((PromptLookupCandidates(), PromptLookupCandidates.published()))


def sssd(architecture: str, rng: random.Random) -> TreeCandidateGenerator:
    return SSSDCandidates(max_prefix=rng.choice((1, 4)), num_nodes=rng.choice((None, 6)))


_BLOCKS: dict[str, Sequence[dict[str, Any]]] = {  # for each kind of block drafters, some of those that there are
    "dflash": ({"windows": (6, None), "causal": (True, False)}, {"from_anchor": True}, {"gemma": True}, {"gate": 4}),
    "jetspec": ({"causal": True, "config": {"causal_head": True}},),
    "dflash2": ({"convolution": (2, 8), "selector_rank": 3},),
    "dspark": (
        {"from_anchor": True, "markov": "vanilla"},
        {"markov": "gated"},
        {"from_anchor": True, "block_size": 4, "markov": "rnn", "confidence": "markov"},
    ),
    "domino": ({"is_domino": True, "from_anchor": True}, {"is_domino": True}),
    "xpress": ({"is_xpress": True},),
}

# Layers of the others pass on several streams of hidden states, which no drafter reads.
_SINGLE_STREAM = tuple(name for name in ARCHITECTURES if name not in STREAMS)

KINDS = {
    "draft model": Kind(draft_model, swap_draft_model),
    "translated": Kind(translated, swap_draft_model),
    "other size": Kind(other_size, swap_draft_model),
    "medusa": Kind(medusa, swap_heads),
    "eagle": Kind(eagle, swap_heads, _SINGLE_STREAM),
    "peagle": Kind(peagle, swap_heads, _SINGLE_STREAM),
    **{name: Kind(partial(blocks, name), swap_heads, _SINGLE_STREAM) for name in _BLOCKS},
    "mtp": Kind(mtp, swap_heads, tuple(NUM_MTP_LAYERS)),
    "early exit": Kind(early_exit, architectures=WRITTEN),
    "mlp speculator": Kind(mlp_speculator, swap_heads),
    "routed": Kind(routed, swap_routed, _SINGLE_STREAM),
    "suffix": Kind(suffix),
    "prompt lookup": Kind(prompt_lookup),
    "sssd": Kind(sssd),
}
GROUPS = {"blocks": tuple(_BLOCKS)}  # names that stand for several


def copied(heads: LearnedDrafter) -> Any:
    """Of heads, not of the target that they may refer to."""
    own = copy.copy(heads)
    own._modules, own._parameters = copy.deepcopy(heads._modules), copy.deepcopy(heads._parameters)
    return own


@torch.no_grad()
def shake(parameters: Iterable[torch.Tensor], rng: random.Random) -> None:
    """Adds noise of a random share of their spread, at times so much that little is left of what they knew."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    share = rng.choice((0.0, 0.03, 0.03, 0.5))
    for parameter in parameters:
        parameter += (
            share * parameter.std(correction=0) * torch.randn(parameter.shape, generator=generator).to(parameter)
        )


@cache
def known_heads(architecture: str) -> MedusaHeads:
    return fitted_heads(target(architecture), known_texts(architecture))


@cache
def known_speculator(architecture: str) -> MLPSpeculator:
    return fitted_speculator(target(architecture), known_texts(architecture))


@cache
def known_eagle(architecture: str) -> EagleHeads:
    return fitted_eagle(target(architecture), known_texts(architecture))


@cache
def known_peagle(architecture: str) -> EagleHeads:
    return fitted_parallel(target(architecture), known_texts(architecture), num_depths=2)


@cache
def known_blocks(architecture: str, kind: str, number: int) -> BlockDrafter:
    return fitted_blocks(target(architecture), known_texts(architecture), **_BLOCKS[kind][number])
