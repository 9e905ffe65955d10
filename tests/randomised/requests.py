"""Random requests: what is asked, and what speculates for it."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_smartspec import FixedLength, LengthPolicy
from hf_smartspec.goodput import (
    ConfidenceGoodput,
    GoodputAuction,
    RequestGoodput,
    RooflineBudget,
    StepGoodput,
    TreeGoodput,
)

from ..cases import EXTRAS, SAMPLING, Setting
from ..costs import UnmovedCost
from ..models import VOCAB_SIZE
from .targets import known_texts, target

_LONGEST_PROMPT, _MOST_NEW_TOKENS = 48, 28


@dataclass(frozen=True)
class Way:
    """Who drafts for a request: one kind, or several that are asked for as a list."""

    kinds: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.kinds[0] if len(self.kinds) == 1 else "lists"

    def __str__(self) -> str:
        return " + ".join(self.kinds)


def random_policy(rng: random.Random) -> LengthPolicy:
    """A fixed number of nodes, the auction where a node costs little, or much, or the papers' own policies."""
    kind, cost = rng.random(), UnmovedCost(alpha=0.0, gamma=rng.choice((1e-5, 1e-5, 1e-3)), delta=1e-2)
    if kind < 0.4:
        return FixedLength(rng.randint(1, rng.choice((14, 14, 64))))
    if kind < 0.8:
        return GoodputAuction(cost)
    papers = (StepGoodput, RequestGoodput, TreeGoodput, ConfidenceGoodput, RooflineBudget.of_profile)
    return rng.choice(papers)(cost)


class TargetSetting(Setting):
    """Of a target of random requests."""

    @property
    def model(self):
        return target(self.architecture)


def random_setting(name: str, architecture: str, prompts: Sequence[Sequence[int]], rng: random.Random) -> TargetSetting:
    """How these prompts are decoded, together if there are several."""
    limit = rng.choice((1, 2, *[rng.randint(3, _MOST_NEW_TOKENS)] * 8))
    eos = rng.choice((None, (rng.randrange(VOCAB_SIZE),), tuple(rng.sample(range(VOCAB_SIZE), 5))))
    extras = rng.choice(EXTRAS)
    return TargetSetting(
        name=name,
        architecture=architecture,
        dtype=torch.float32,
        prompts=tuple(map(tuple, prompts)),
        limit={"max_new_tokens": limit},
        eos=eos,
        sampling=rng.choice(SAMPLING) if rng.random() < 0.5 else None,
        extras={} if "min_new_tokens" in extras and (eos is None or limit < 8) else extras,
        seed=rng.randrange(2**40),
    )


def random_prompt(architecture: str, beginning: list[int], rng: random.Random) -> list[int]:
    """
    Of any length: phrases that come again, the beginning of a text that drafters know, or a beginning that others
    share; each may end otherwise.
    """
    kind = rng.random()
    if kind < 0.3:
        text = rng.choice(known_texts(architecture).tolist())
        prompt = text[: rng.randint(1, len(text) - 8)]
    else:
        phrase = [rng.randrange(1, VOCAB_SIZE) for _ in range(rng.randint(1, 6))]
        words = [phrase[index % len(phrase)] for index in range(rng.randint(1, _LONGEST_PROMPT))]
        prompt = (beginning if kind < 0.7 else []) + words
    prompt += [rng.randrange(1, VOCAB_SIZE) for _ in range(rng.choice((0, 0, 1, 3)))]
    # transformers' RecurrentGemma takes any forward of one token for a step of decoding: plain `generate`, which is the
    # reference, begins a prompt of one token with the states that earlier texts have left in its modules.
    is_step = architecture == "recurrent_gemma" and len(prompt) == 1
    return 2 * prompt if is_step else prompt


def arguments_of(setting: Setting) -> dict[str, Any]:
    """Of a request to an engine, which has no padding."""
    return {
        name: value
        for name, value in setting.speculative_arguments().items()
        if name not in ("input_ids", "attention_mask")
    }
