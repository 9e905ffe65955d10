"""What runs on torch: a model from its folder, and `generate` for as many tokens as are asked for."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from .protocol import Decode, Prompts


def load_model(job: dict[str, Any]) -> Any:
    torch.set_num_threads(job["threads"])
    dtype = torch.bfloat16 if job["kind"] == "int8" else getattr(torch, job["kind"])
    model = AutoModelForCausalLM.from_pretrained(job["files"]["model"], dtype=dtype).eval()
    model.generation_config = GenerationConfig(pad_token_id=0)  # no end of sequence: as many tokens as are asked for
    return model


def generated(model: Any, arguments: dict[str, Any] | None = None) -> Decode:
    def decode(prompts: Prompts, num_tokens: int) -> list[list[int]]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        given = {"attention_mask": mask, "max_new_tokens": num_tokens, "do_sample": False}
        output = model.generate(ids, **given, **(arguments or {}))
        return output[:, longest:].tolist()

    return decode
