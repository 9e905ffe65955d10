"""
`device_map` of accelerate: layers that lie on the disk are read once for all tokens of a draft, not once for each.

    python demos/examples/offloaded.py
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_smartspec

MODEL = Path(__file__).resolve().parents[1] / "models/target"
PROMPT = "def add(a, b):"
# Half of the layers on the disk. On a GPU, `device_map="auto"` with `max_memory` decides.
PLACES = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
PLACES |= {f"model.layers.{index}": "cpu" if index < 4 else "disk" for index in range(8)}


def main() -> tuple[Any, Any, hf_smartspec.GenerationStatistics]:
    """Return the outputs without and with speculation, and print how much was drafted."""
    inputs = AutoTokenizer.from_pretrained(MODEL)(PROMPT, return_tensors="pt")
    arguments = {**inputs, "max_new_tokens": 48, "do_sample": False}
    with tempfile.TemporaryDirectory() as folder:
        model = AutoModelForCausalLM.from_pretrained(
            MODEL, dtype=torch.float32, device_map=PLACES, offload_folder=folder
        )
        plain = model.generate(**arguments).tolist()

        hf_smartspec.enable(model, assistant="auto")  # the line
        fast = model.generate(**arguments).tolist()

    statistics = model.smartspec_statistics.total
    print(f"The same without speculation: {plain == fast}.")
    print(f"{statistics.generated_tokens} tokens, for which the layers were read {statistics.forwards} times")
    print(f"{statistics.acceptance_rate:.0%} of {statistics.drafted_tokens} drafted tokens accepted")
    return plain, fast, statistics


if __name__ == "__main__":
    main()
