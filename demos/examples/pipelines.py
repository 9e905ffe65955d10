"""
`pipeline("text-generation")` with one line more: texts, batches and chats come out as before.

    python demos/examples/pipelines.py
"""

from pathlib import Path
from typing import Any

import torch
from transformers import pipeline

import hf_smartspec

MODEL = Path(__file__).resolve().parents[1] / "models/target"
INPUTS: dict[str, Any] = {
    "a text": "def add(a, b):",
    "a batch": ["def multiply(a, b):", "SELECT name FROM users WHERE", "Create an archive:"],
    "a chat": [{"role": "user", "content": "What is 12 times 4?"}],
}


def main() -> tuple[Any, Any, hf_smartspec.GenerationStatistics]:
    """Return the outputs without and with speculation, and print how much was drafted."""
    generator = pipeline("text-generation", model=str(MODEL), dtype=torch.float32)
    arguments = {"max_new_tokens": 48, "do_sample": False, "batch_size": 3}
    plain = {name: generator(inputs, **arguments) for name, inputs in INPUTS.items()}

    hf_smartspec.enable(generator, assistant="auto")  # the line
    fast = {name: generator(inputs, **arguments) for name, inputs in INPUTS.items()}

    # Pipelines hand on what they do not know: one call may do without, or ask for a seed.
    generator("What is 7 times 8?", max_new_tokens=8, assistant="none")
    sampled = [generator("Once upon a time", max_new_tokens=24, seed=7)[0]["generated_text"] for _ in range(2)]

    statistics = generator.model.smartspec_statistics.total
    print(fast["a chat"][0]["generated_text"][-1]["content"])
    print(f"The same without speculation: {plain == fast}. The same for the same seed: {sampled[0] == sampled[1]}.")
    print(f"{statistics.acceptance_rate:.0%} of {statistics.drafted_tokens} drafted tokens accepted")
    return [plain, sampled[0]], [fast, sampled[1]], statistics


if __name__ == "__main__":
    main()
