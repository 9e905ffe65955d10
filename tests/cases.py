"""The case generator of the exactness tests: seeded, so that every case can be run again by its name."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation import logits_process as hf

from hf_smartspec import (
    DraftModelCandidates,
    PromptLookupCandidates,
    SeededGumbelLogitsProcessor,
    SuffixTreeCandidates,
    TreeCandidateGenerator,
)

from .models import CONFIGS, DEVICE, PACKED, RECURRENT, VOCAB_SIZE, noisy_model, shared_model
from .sources import Empty, Flaky, Oracle, Random, WithDecoys, Wrong

# What `generate(do_sample=True)` is given, and the warpers that it makes of it, in its order.
SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7},
    {"temperature": 1.5, "top_k": 20},
    {"top_p": 0.9},
    {"temperature": 0.8, "top_k": 30, "top_p": 0.8},
    {"min_p": 0.05},
    {"typical_p": 0.9},
    {"epsilon_cutoff": 0.01},
)
_WARPERS = {
    "temperature": hf.TemperatureLogitsWarper,
    "top_k": hf.TopKLogitsWarper,
    "top_p": hf.TopPLogitsWarper,
    "min_p": hf.MinPLogitsWarper,
    "typical_p": hf.TypicalLogitsWarper,
    "epsilon_cutoff": hf.EpsilonLogitsWarper,
}
# Further arguments, most of them none: the fast path of greedy rows runs without processors.
EXTRAS: tuple[dict[str, Any], ...] = (
    *[{}] * 5,
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 2},
    {"min_new_tokens": 6},
)


@dataclass(frozen=True)
class Setting:
    """
    One call of `generate`, which has one right answer.

    Args:
        prompts: One tuple of tokens per row; no two are equal.
        limit (`dict`): `max_new_tokens` or `max_length`.
        eos: Tokens that end a row; None for rows that run up to the limit.
        sampling (`dict`, *optional*): One of `SAMPLING`; None for greedy.
        extras (`dict`): One of `EXTRAS`.
    """

    name: str
    architecture: str
    dtype: torch.dtype
    prompts: tuple[tuple[int, ...], ...]
    limit: dict[str, int]
    eos: tuple[int, ...] | None
    sampling: dict[str, Any] | None
    extras: dict[str, Any]
    seed: int

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def model(self):
        return shared_model(self.architecture, dtype=self.dtype)

    @cached_property
    def inputs(self) -> dict[str, torch.Tensor]:
        return left_padded(self.prompts)

    def arguments(self) -> dict[str, Any]:
        """What both calls of `generate` are given."""
        eos = None if self.eos is None else list(self.eos)
        return self.inputs | self.limit | self.extras | {"eos_token_id": eos}

    def warpers(self) -> LogitsProcessorList:
        """What `do_sample=True` adds in transformers, and the noise."""
        assert self.sampling is not None
        made = [warper(self.sampling[name]) for name, warper in _WARPERS.items() if name in self.sampling]
        return LogitsProcessorList([*made, SeededGumbelLogitsProcessor(self.seed)])

    def reference(self) -> torch.Tensor:
        """Plain `generate`, `[batch, length]`: once per model, since many tests compare with the same tokens."""
        return _reference(self.model, self).clone()

    def speculative_arguments(self) -> dict[str, Any]:
        if self.sampling is None:
            return self.arguments() | {"do_sample": False}
        everything = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}  # transformers' default of top_k is 50
        return self.arguments() | everything | self.sampling | {"do_sample": True, "seed": self.seed}

    def texts(self, sequences: torch.Tensor) -> list[list[int]]:
        """Rows of a result without their padding, on either side."""
        width = self.inputs["input_ids"].shape[1]
        return [list(prompt) + self.continuation(ids[width:].tolist()) for prompt, ids in zip(self.prompts, sequences)]

    def continuation(self, tokens: list[int]) -> list[int]:
        """Generated tokens up to the first that ends the row, included."""
        ends = [index for index, token in enumerate(tokens) if token in (self.eos or ())]
        return tokens[: ends[0] + 1] if ends else tokens


@lru_cache(maxsize=32)
def _reference(model: PreTrainedModel, setting: Setting) -> torch.Tensor:
    processors = {} if setting.sampling is None else {"logits_processor": setting.warpers()}
    return model.generate(**setting.arguments(), **processors, do_sample=False)


@dataclass(frozen=True)
class Case:
    """A setting and one way to speculate in it."""

    setting: Setting
    kind: str  # of source
    is_tree: bool
    num_nodes: int
    returns_dict: bool  # the engine keeps finished rows' memory in this case

    @property
    def name(self) -> str:
        shape = "tree" if self.is_tree else "chain"
        return f"{self.setting.name}/{self.kind}-{shape}-{self.num_nodes}{'-dict' * self.returns_dict}"

    def source(self, reference: torch.Tensor) -> TreeCandidateGenerator:
        setting = self.setting
        if self.kind == "draft":
            draft = noisy_model(setting.architecture, dtype=setting.dtype)
            return DraftModelCandidates(draft, width=random.Random(self.name).randint(2, 4) if self.is_tree else 1)
        if self.kind == "foreign":
            draft = shared_model("gpt2" if setting.architecture == "llama" else "llama", seed=1)
            return DraftModelCandidates(draft, width=2 if self.is_tree else 1)
        if self.kind in ("random", "flaky"):
            return {"random": Random, "flaky": Flaky}[self.kind](setting.seed, self.is_tree)
        if self.kind == "suffix":
            source = SuffixTreeCandidates(max_bytes=2**20, min_probability=0.02, chains=not self.is_tree)
            rng = random.Random(self.name)
            for text in setting.texts(reference):  # earlier outputs that resemble these: right drafts, and wrong ones
                changed = [rng.randrange(VOCAB_SIZE) if rng.random() < 0.1 else token for token in text]
                source.add_outputs([changed, text[::-1]], progress=False)
            return source
        if self.kind == "wrong":
            return Wrong(setting.texts(reference), setting.seed, self.is_tree)
        chains = {
            "lookup": PromptLookupCandidates,
            "oracle": lambda: Oracle(setting.texts(reference)),
            "empty": Empty,
        }[self.kind]()
        return WithDecoys(chains, setting.seed) if self.is_tree else chains


def prompts_of(lengths) -> list[list[int]]:
    """Prompts of few different tokens, so that there is something to look up."""
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(3, 9, (length,), generator=generator).tolist() for length in lengths]


def left_padded(prompts) -> dict[str, torch.Tensor]:
    """A batch of ragged prompts and its mask."""
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return {"input_ids": ids.to(DEVICE), "attention_mask": mask.to(DEVICE)}


def settings(
    architecture: str, samples: bool, count: int, first: int = 0, dtype: torch.dtype = torch.float32
) -> Iterator[Setting]:
    """`count` settings; what matters most goes round evenly, the rest is drawn."""
    offset = list(CONFIGS).index(architecture)
    for index in range(first, first + count):
        name = f"{architecture}/{'sampled' if samples else 'greedy'}/{index}"
        rng = random.Random(name)
        turn = offset + index + (3 if samples else 0)
        max_new_tokens = rng.choice((1, 2, 3, *[rng.randint(8, 24)] * 9))
        prompts = _prompts(rng, batch=turn % 6 + 1)
        longest = max(map(len, prompts))
        limit = {"max_new_tokens": max_new_tokens} if rng.random() < 0.6 else {"max_length": longest + max_new_tokens}
        eos = (None, tuple(rng.sample(range(VOCAB_SIZE), 6)), (rng.randrange(VOCAB_SIZE),))[turn % 3]
        extras = rng.choice(EXTRAS)
        yield Setting(
            name=name if dtype == torch.float32 else f"{name}/{dtype}",
            architecture=architecture,
            dtype=dtype,
            prompts=prompts,
            limit=limit,
            eos=eos,
            sampling=SAMPLING[turn % len(SAMPLING)] if samples else None,
            # A minimum is an end-of-sequence token's, and must lie below the limit.
            extras={} if "min_new_tokens" in extras and (eos is None or max_new_tokens < 8) else extras,
            seed=rng.randrange(2**40),
        )


def cases(setting: Setting) -> list[Case]:
    """
    Six ways to speculate: draft model and prompt lookup as chain and as tree, suffix trees, and one of the artificial
    ones. The draft model is a noisy copy of the target, or another model where the target's kind cannot draft.
    """
    rng = random.Random(f"{setting.name}/cases")
    model = "draft" if setting.architecture in PACKED | RECURRENT else "foreign"
    kinds = [(model, False), (model, True), ("lookup", False), ("lookup", True)]
    others = ("foreign", "random", "oracle", "wrong", "flaky", "empty")
    kinds += [(kind, rng.random() < 0.5) for kind in ("suffix", rng.choice(others))]
    return [
        Case(setting, kind, is_tree, rng.randint(3, 14) if is_tree else rng.randint(1, 10), rng.random() < 0.4)
        for kind, is_tree in kinds
    ]


def all_cases(architecture: str, count: int, first: int = 0, **options: Any) -> Iterator[tuple[Setting, list[Case]]]:
    for samples in (False, True):
        for setting in settings(architecture, samples, count, first, **options):
            yield setting, cases(setting)


def _prompts(rng: random.Random, batch: int) -> tuple[tuple[int, ...], ...]:
    """Ragged and repetitive, so that lookup finds something; one row in eight is a single token."""
    prompts: dict[tuple[int, ...], None] = {}
    while len(prompts) < batch:
        length = 1 if rng.random() < 0.125 else rng.randint(2, 16)
        phrase = [rng.randrange(1, VOCAB_SIZE) for _ in range(rng.randint(2, 5))]
        words = (phrase[i % len(phrase)] if rng.random() < 0.8 else rng.randrange(1, VOCAB_SIZE) for i in range(length))
        prompts[tuple(words)] = None
    return tuple(prompts)
