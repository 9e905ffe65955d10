"""Code of the peers on torch: a model from its file, and `generate` for as many tokens as are asked for."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import GenerationConfig

from .protocol import Decode, Prompts


def load_model(job: dict[str, Any], name: str = "model") -> Any:
    """Load a whole pickled model with its class: transformers reads no sizes of enlarged models from a config."""
    torch.set_num_threads(job["threads"])
    model = torch.load(job["files"][name], weights_only=False)
    model.generation_config = GenerationConfig(pad_token_id=0)  # no end of sequence: as many tokens as are asked for
    return model


def about() -> str:
    return (
        f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.backends.cpu.get_cpu_capability()}"
    )


def generated(model: Any, arguments: dict[str, Any] | None = None) -> Decode:
    def decode(prompts: Prompts, num_tokens: int) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        given = {"attention_mask": mask, "max_new_tokens": num_tokens, "do_sample": False}
        output = model.generate(ids, **given, **(arguments or {}))
        return output[:, longest:].tolist()

    return decode


def unlearning(draft: Any) -> Callable[[int], None]:
    """
    Return a function that restores the draft's generation config, on which transformers leaves the draft length that it
    has learnt, and more.
    """
    before = copy.deepcopy(draft.generation_config)

    def prepare(num_rows: int) -> None:
        draft.generation_config = copy.deepcopy(before)

    return prepare
