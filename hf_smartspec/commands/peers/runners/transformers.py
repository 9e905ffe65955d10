"""transformers' own `generate`."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, CompileConfig

from .hugging_face import generated, load_model
from .protocol import Way, serve


def load(job: dict[str, Any]) -> dict[str, Way]:
    model = load_model(job)
    if job["settings"].get("compiled"):
        return {"compiled, static cache": Way(generated(model, _compiled()), in_batches=True)}
    draft = AutoModelForCausalLM.from_pretrained(job["files"]["draft"], dtype=getattr(torch, job["kind"]))
    return {
        "plain": Way(generated(model), in_batches=True),
        "prompt lookup": Way(generated(model, {"prompt_lookup_num_tokens": 10})),
        "assisted": Way(generated(model, {"assistant_model": draft.eval()})),
    }


def _compiled() -> dict[str, Any]:
    config = CompileConfig()
    config._compile_all_devices = True  # transformers compiles on GPUs only, if it is not asked
    return {"cache_implementation": "static", "compile_config": config}


if __name__ == "__main__":
    serve(load)
