"""This library."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM

import hf_smartspec

from .hugging_face import generated, load_model
from .protocol import Way, serve


def load(job: dict[str, Any]) -> dict[str, Way]:
    model = load_model(job)
    draft = AutoModelForCausalLM.from_pretrained(job["files"]["draft"], dtype=model.dtype).eval()
    ways: dict[str, dict[str, Any]] = {name: {"assistant": name} for name in ("none", "prompt_lookup", "auto")}
    ways["draft model"] = {"assistant": draft}
    if job["kind"] == "int8":
        hf_smartspec.quantize(model, "int8")
        ways = {"generate on it": {}} | ways
    with torch.no_grad():
        hf_smartspec.enable(model)
    return {name: Way(generated(model, arguments), in_batches=True) for name, arguments in ways.items()}


if __name__ == "__main__":
    serve(load)
