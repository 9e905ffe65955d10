"""Models and texts of the bench: a target as it is, and enlarged to the cost of large ones."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_smartspec.commands.common.arguments import UsageError
from hf_smartspec.commands.common.cost_matched import enlarge
from hf_smartspec.commands.common.models import PROMPTS, encode, left_padded, load_model, load_tokenizer
from hf_smartspec.commands.common.recordings import Fields, Texts, read_requests
from hf_smartspec.commands.common.runs import eos_ids, up_to_end
from hf_smartspec.commands.common.setup import Setup
from hf_smartspec.target_model.graphs import RUNS_UNTIL_RECORDED

from .arguments import OWN


@dataclass(frozen=True)
class Plan:
    """
    Sizes of what is measured.

    Args:
        shapes (`dict`): Parameters of the cost-matched targets, by name.
        dtype (`str`): Their dtype.
        batch_sizes (sequence of `int`): Those that matter most first.
        widths (dict): Tokens per row of a verification, by batch size.
        context, new_tokens (`int`): Tokens of the prompts, and of the answers, where the text does not matter.
        text_tokens (`int`): Most tokens of the answers to prompts of real text.
        requests (`int`): Number of requests of real text that are served one after the other at batch 1.
        correct_sizes, correct_tokens: Batch sizes, and new tokens, where tokens are compared.
        copied (`int`): Bytes by which the bandwidth is measured.
        repeats (`int`): Timed runs of a forward.
        warm_ups, runs (`int`): The most runs of a whole workload before it is timed, and timed ones.
        repeated_for (`float`): Seconds of either after which no further ones begin.
    """

    shapes: dict[str, float] = field(default_factory=lambda: {"7B": 6.7e9, "1B": 1.1e9})
    dtype: str = "bfloat16"
    batch_sizes: Sequence[int] = (1, 128, 8, 32)
    widths: dict[int, Sequence[int]] = field(
        default_factory=lambda: {1: (1, 16, 2, 4, 8, 32, 64), 8: (1, 4, 16), 32: (1, 4, 8), 128: (1, 2, 4)}
    )
    context: int = 128
    new_tokens: int = 64
    text_tokens: int = 64
    requests: int = 2
    correct_sizes: Sequence[int] = (1, 3, 8)
    correct_tokens: int = 24
    copied: int = 2**31
    repeats: int = 11
    warm_ups: int = RUNS_UNTIL_RECORDED
    runs: int = 3
    repeated_for: float = 2.5

    @classmethod
    def smoke(cls) -> "Plan":
        """Return sizes with which the same code takes seconds on any device; its figures mean nothing."""
        return cls(
            shapes={"7B": 0.0},  # as small as the embedded target
            dtype="float32",
            batch_sizes=(1, 2),
            widths={1: (1, 16), 2: (1, 2)},
            context=16,
            new_tokens=4,
            text_tokens=5,
            requests=1,
            correct_sizes=(1, 3),
            correct_tokens=5,
            copied=2**22,
            repeats=2,
            warm_ups=1,
            runs=1,
        )


class Workload(NamedTuple):
    """Requests, and what the target is made to answer, int64 `[prompt_len]` and `[n]`; at least one token each."""

    prompts: list[np.ndarray]
    responses: list[np.ndarray]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.responses))


class World:
    """
    The device and the models on it, which are loaded and enlarged when they are asked for.

    Args:
        names (`dict`): Folders or hub ids: "target" and, if there is one, "draft".
        prompts (`Path`): A .jsonl file of prompts and responses.

    Attributes:
        has_time (`Callable`): Returns whether the section that is measured has time left.

    Raises:
        UsageError: If the target has no tokenizer.
    """

    def __init__(self, plan: Plan, device: torch.device, names: dict[str, str], prompts: Path):
        tokenizer = load_tokenizer(names["target"])
        if tokenizer is None:
            raise UsageError(f"--model: {names['target']!r} has no tokenizer")
        self.plan, self.device, self.names, self._prompts = plan, device, names, prompts
        self.tokenizer: PreTrainedTokenizerBase = tokenizer
        self.has_time: Callable[[], bool] = lambda: True
        self._loaded: dict[tuple[str, str], PreTrainedModel] = {}
        self._shape: tuple[str, PreTrainedModel] | None = None
        self._own_text: dict[int, Workload] = {}

    def loaded(self, name: str, dtype: str) -> PreTrainedModel:
        """Return "target" or "draft" as it is."""
        if (name, dtype) not in self._loaded:
            model = load_model(self.names[name], dtype, str(self.device))
            if model.generation_config.pad_token_id is None:
                model.generation_config.pad_token_id = 0
            self._loaded[name, dtype] = model
        return self._loaded[name, dtype]

    def draft(self, dtype: str | None = None) -> PreTrainedModel | None:
        """Return the draft model in `dtype`, by default the plan's; None if there is none."""
        return self.loaded("draft", dtype or self.plan.dtype) if "draft" in self.names else None

    def target(self, shape: str) -> PreTrainedModel:
        """
        Return the target at a size, of which one is kept at a time. It has no end-of-sequence token: texts have their
        lengths.
        """
        if self._shape is None or self._shape[0] != shape:
            self._shape = None  # frees its memory before another one is made
            gc.collect()
            if shape == OWN:
                model = load_model(self.names["target"], self.plan.dtype, str(self.device))
            else:
                small = self.loaded("target", self.plan.dtype)
                model = enlarge(small, max(self.plan.shapes[shape], small.num_parameters()))
            model.generation_config = GenerationConfig(pad_token_id=0)
            self._shape = shape, model
        return self._shape[1]

    def setup(self, model: PreTrainedModel, draft: PreTrainedModel | None) -> Setup:
        """Return what `sources_by_name` takes, for sources that draft for this model."""
        return Setup(model, draft, [], max_new_tokens=0, max_batch_size=1, seed=0)

    def prompts(self) -> list[list[int]]:
        """Return neutral prompts of different lengths."""
        return encode(PROMPTS, self.tokenizer, self._longest_prompt(self.plan.correct_tokens))

    def _longest_prompt(self, num_tokens: int) -> int:
        positions: int = self.loaded("target", "float32").config.max_position_embeddings
        return min(self.plan.context, positions - num_tokens)

    def requests(self) -> list[Texts]:
        return read_requests(self._prompts, Fields(), None)

    def random_text(self, num_rows: int) -> Workload:
        """Return random tokens, for measurements that depend on their number only."""
        plan, rng = self.plan, np.random.default_rng(num_rows)
        vocab_size = self.loaded("target", "float32").config.vocab_size
        sizes = [(num_rows, plan.context), (num_rows, plan.new_tokens)]
        prompts, responses = (list(rng.integers(4, vocab_size, size)) for size in sizes)
        return Workload(prompts, responses)

    def recorded_text(self, num_rows: int) -> Workload:
        """Return the prompts with their recorded responses."""
        limit, items = self.plan.text_tokens, self.requests()
        items = items[:: max(len(items) // num_rows, 1)][:num_rows]
        prompts = encode(["\n".join(item.context) for item in items], self.tokenizer, self._longest_prompt(limit))
        answers = [self.tokenizer(item.response, add_special_tokens=False).input_ids for item in items]
        return Workload(*([np.array(row, np.int64) for row in rows] for rows in (prompts, _cut(answers, limit))))

    @torch.no_grad()
    def own_text(self, num_rows: int) -> Workload:
        """
        Return what the target generates as it is, in float32. Where there are fewer prompts than rows, they come again
        without their first tokens.
        """
        if num_rows not in self._own_text:
            model, limit = self.loaded("target", "float32"), self.plan.text_tokens
            texts = ["\n".join(item.context) for item in self.requests()]
            texts = texts[:: max(len(texts) // num_rows, 1)]
            rows = encode(texts, self.tokenizer, self._longest_prompt(limit))
            turns = -(-num_rows // len(rows))
            prompts = [np.array(row[turn:], np.int64) for turn in range(turns) for row in rows][:num_rows]
            inputs = left_padded(prompts, 0, self.device)
            found = model.generate(**inputs, do_sample=False, max_new_tokens=limit)
            answers = found[:, inputs["input_ids"].shape[1] :].tolist()
            ends = set(eos_ids(model))
            self._own_text[num_rows] = Workload(prompts, [np.array(up_to_end(row, ends), np.int64) for row in answers])
        return self._own_text[num_rows]


def _cut(rows: Sequence[list[int]], limit: int) -> list[list[int]]:
    return [row[:limit] for row in rows]
