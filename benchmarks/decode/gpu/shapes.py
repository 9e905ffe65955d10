"""The models and texts of the bench: the embedded target, and the same at the cost of large ones."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_smartspec.commands.common.arguments import UsageError
from hf_smartspec.commands.common.cost_matched import enlarge
from hf_smartspec.commands.common.demo import find_demo
from hf_smartspec.commands.common.models import PROMPTS, encode, left_padded, load_model, load_tokenizer
from hf_smartspec.commands.common.recordings import Fields, Texts, read_requests
from hf_smartspec.commands.common.runs import eos_ids, up_to_end


@dataclass(frozen=True)
class Plan:
    """
    What is measured, and how large it is.

    Args:
        shapes (`dict`): Parameters of the cost-matched targets, by name.
        dtype (`str`): Of theirs.
        batch_sizes (sequence of `int`): Those that matter most first.
        widths (dict): Tokens per row of a verification, by batch size.
        context, new_tokens (`int`): Tokens of the prompts, and behind them, where the text does not matter.
        text_tokens (`int`): The same behind prompts of real text, at most.
        requests (`int`): That are served one after the other at batch 1 of real text.
        correct_sizes, correct_tokens: Batch sizes, and new tokens, where tokens are compared.
        copied (`int`): Bytes by which the bandwidth is measured.
        repeats (`int`): Timed runs of a forward; runs of a whole batch are at most `runs`.
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
    requests: int = 4
    correct_sizes: Sequence[int] = (1, 3, 8)
    correct_tokens: int = 24
    copied: int = 2**31
    repeats: int = 11
    runs: int = 2

    @classmethod
    def smoke(cls) -> "Plan":
        """The same code in seconds, on any device; the figures mean nothing."""
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
            runs=1,
        )


class Workload(NamedTuple):
    """Requests, and what the target is made to answer, int64 `[prompt_len]` and `[n]`; at least one token each."""

    prompts: list[np.ndarray]
    responses: list[np.ndarray]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.responses))

    def cut(self, num_tokens: int) -> "Workload":
        """With shorter answers."""
        return Workload(self.prompts, [response[:num_tokens] for response in self.responses])


class World:
    """The device with what lies on it; models are loaded, and made, when they are asked for."""

    def __init__(self, plan: Plan, device: torch.device):
        folder = find_demo()
        if folder is None:
            raise UsageError("the embedded models are not here: run this in a checkout of the repository")
        tokenizer = load_tokenizer(str(folder / "models" / "target"))
        assert tokenizer is not None, "found beside the model"
        self.plan, self.device, self._folder = plan, device, folder
        self.tokenizer: PreTrainedTokenizerBase = tokenizer
        self._loaded: dict[tuple[str, str], PreTrainedModel] = {}
        self._shape: tuple[str, PreTrainedModel] | None = None
        self._own_text: dict[int, Workload] = {}

    def embedded(self, name: str, dtype: str) -> PreTrainedModel:
        """ "target" or "draft", as it is."""
        if (name, dtype) not in self._loaded:
            model = load_model(str(self._folder / "models" / name), dtype, str(self.device))
            if model.generation_config.pad_token_id is None:
                model.generation_config.pad_token_id = 0
            self._loaded[name, dtype] = model
        return self._loaded[name, dtype]

    @property
    def draft(self) -> PreTrainedModel:
        return self.embedded("draft", self.plan.dtype)

    def target(self, shape: str) -> PreTrainedModel:
        """The cost-matched target, one at a time. It knows no end of sequence: texts say how long they are."""
        if self._shape is None or self._shape[0] != shape:
            self._shape = None  # before there is another
            gc.collect()
            small = self.embedded("target", self.plan.dtype)
            model = enlarge(small, max(self.plan.shapes[shape], small.num_parameters()))
            model.generation_config = GenerationConfig(pad_token_id=0)
            self._shape = shape, model
        return self._shape[1]

    def prompts(self) -> list[list[int]]:
        """Neutral ones of different lengths."""
        return encode(PROMPTS, self.tokenizer, self._longest_prompt(self.plan.correct_tokens))

    def _longest_prompt(self, num_tokens: int) -> int:
        positions: int = self.embedded("target", self.plan.dtype).config.max_position_embeddings
        return min(self.plan.context, positions - num_tokens)

    def requests(self) -> list[Texts]:
        return read_requests(Path(self._folder / "prompts.jsonl"), Fields(), None)

    def random_text(self, num_rows: int) -> Workload:
        """Where it matters how many tokens there are, not which."""
        plan, rng = self.plan, np.random.default_rng(num_rows)
        vocab_size = self.embedded("target", plan.dtype).config.vocab_size
        sizes = [(num_rows, plan.context), (num_rows, plan.new_tokens)]
        prompts, responses = (list(rng.integers(4, vocab_size, size)) for size in sizes)
        return Workload(prompts, responses)

    def recorded_text(self, num_rows: int) -> Workload:
        """What people answered."""
        limit, items = self.plan.text_tokens, self.requests()
        items = items[:: max(len(items) // num_rows, 1)][:num_rows]
        prompts = encode(["\n".join(item.context) for item in items], self.tokenizer, self._longest_prompt(limit))
        answers = [self.tokenizer(item.response, add_special_tokens=False).input_ids for item in items]
        return Workload(*([np.array(row, np.int64) for row in rows] for rows in (prompts, _cut(answers, limit))))

    @torch.no_grad()
    def own_text(self, num_rows: int) -> Workload:
        """
        What the embedded target says by itself, in float32. Where there are fewer prompts than rows, they come again
        without their first tokens.
        """
        if num_rows not in self._own_text:
            model, limit = self.embedded("target", "float32"), self.plan.text_tokens
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
