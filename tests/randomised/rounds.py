"""
Rounds of random requests, compared with plain `generate`. All that a round does is drawn from its seed, so that it can
be played again: who drafts, how much, in pieces of which length prompts are run, who is cancelled at which step, and
when drafters' weights are swapped.
"""

import logging
import random
from collections.abc import Sequence
from unittest import mock

import torch

import hf_smartspec
from hf_smartspec import SmartSpecConfig
from hf_smartspec.prepare import draft_models

from ..models import UNPADDED
from .drafters import Drafters
from .engines import serve
from .kinds import KINDS
from .outcome import Complaints, Outcome
from .requests import random_policy, random_prompt, random_setting
from .targets import ARCHITECTURES

_NUM_CALLS, _LARGEST_BATCH = 3, 8


def play(seed: int, kinds: Sequence[str] = tuple(KINDS), targets: Sequence[str] = ARCHITECTURES) -> Outcome:
    """One round: the requests of an engine, or some calls of `generate`. Every kind drafts for some of the targets."""
    rng, outcome = random.Random(seed), Outcome(seed)
    architecture, kinds = _drawn(kinds, targets, seed, rng)
    complaints, log = Complaints(outcome), logging.getLogger("hf_smartspec")
    log.addHandler(complaints)
    try:
        # Of vocabularies of a hundred tokens, more than a hundredth may be padding.
        with mock.patch.object(draft_models, "_PADDING", 0.2):
            drafters = Drafters(kinds, architecture, rng, outcome)
            is_served = rng.random() < 0.7 or architecture in UNPADDED  # whose padded batches nobody drafts for
            (serve if is_served else _call)(architecture, drafters, rng, outcome)
    except Exception as error:
        outcome.add_fault(f"failed: {error!r}")
    finally:
        log.removeHandler(complaints)
    outcome.targets[architecture] += outcome.counts["requests"]
    return outcome


def _drawn(kinds: Sequence[str], targets: Sequence[str], seed: int, rng: random.Random) -> tuple[str, list[str]]:
    """A target's architecture, and some kinds that draft for it: one whose turn it is, and others beside it."""
    first = kinds[seed % len(kinds)]
    architecture = rng.choice([name for name in KINDS[first].architectures if name in targets])
    others = [name for name in kinds if name != first and architecture in KINDS[name].architectures]
    return architecture, [first, *rng.sample(others, min(len(others), rng.choice((2, 3, len(others)))))]


def _call(architecture: str, drafters: Drafters, rng: random.Random, outcome: Outcome) -> None:
    """`generate` for batches, one after the other."""
    for number in range(_NUM_CALLS):
        prompts = {tuple(random_prompt(architecture, [], rng)) for _ in range(rng.randint(1, _LARGEST_BATCH))}
        way = drafters.random_way(rng)
        where = f"call {number}, {way}"
        setting = random_setting(where, architecture, sorted(prompts), rng)
        pieces = {"prefill_chunk_size": rng.randint(2, 9)} if rng.random() < 0.3 else {}
        expected = setting.reference()
        with hf_smartspec.enabled(setting.model):
            output = setting.model.generate(
                **setting.speculative_arguments(),
                **pieces,
                assistant=SmartSpecConfig(drafters.assistant(way), policy=random_policy(rng)),
                return_dict_in_generate=True,
            )
        outcome.add_drafts(way, len(prompts), output.statistics)
        width, differed = setting.inputs["input_ids"].shape[1], len(outcome.faults + outcome.ties)
        for row, lines in enumerate(zip(expected[:, width:].tolist(), output.sequences[:, width:].tolist())):
            outcome.compare(setting, row, *map(setting.continuation, lines), where)
        if len(outcome.faults + outcome.ties) == differed and not torch.equal(expected, output.sequences):
            outcome.add_fault(f"{where}: texts are equal and their padding is not")
