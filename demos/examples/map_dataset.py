"""
`datasets`: a column of answers by `map`, from `generate` in batches and from an `Engine`.

    pip install datasets
    python demos/examples/map_dataset.py
"""

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_smartspec

DEMOS = Path(__file__).resolve().parents[1]
ARGUMENTS = {"max_new_tokens": 32, "do_sample": False}


def main() -> tuple[Any, Any, hf_smartspec.GenerationStatistics]:
    """Return the outputs without and with speculation, and print how much was drafted."""
    tokenizer = AutoTokenizer.from_pretrained(DEMOS / "models/target", padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(DEMOS / "models/target", dtype=torch.float32)
    dataset = Dataset.from_json(str(DEMOS / "prompts.jsonl")).select_columns(["prompt"]).select(range(4, 12))

    def answer(batch: dict[str, list[str]]) -> dict[str, list[str]]:
        inputs = tokenizer(batch["prompt"], padding=True, return_tensors="pt").to(model.device)
        outputs = model.generate(**inputs, **ARGUMENTS)
        return {"answer": tokenizer.batch_decode(outputs[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)}

    # `map` keeps results by a hash of the function and all that it uses: models and engines have no lasting one.
    options = {"batched": True, "batch_size": 4, "load_from_cache_file": False}
    plain = dataset.map(answer, new_fingerprint="plain", **options)["answer"][:]

    hf_smartspec.enable(model, assistant="auto")  # the line
    fast = dataset.map(answer, new_fingerprint="fast", **options)["answer"][:]

    with hf_smartspec.Engine(model, assistant="auto", max_batch_size=8, tokenizer=tokenizer) as engine:

        def ask(batch: dict[str, list[str]]) -> dict[str, list[str]]:
            outputs = engine.generate(batch["prompt"], **ARGUMENTS)
            return {"answer": [tokenizer.decode(item.generated_tokens, skip_special_tokens=True) for item in outputs]}

        # The whole dataset at once: the engine itself decides what runs together.
        served = dataset.map(ask, new_fingerprint="served", **options | {"batch_size": None})["answer"][:]

    statistics = model.smartspec_statistics.total + engine.statistics
    print(f"The same without speculation: {plain == fast} by `generate`, {plain == served} by an engine.")
    print(f"{statistics.acceptance_rate:.0%} of {statistics.drafted_tokens} drafted tokens accepted")
    return [plain, plain], [fast, served], statistics


if __name__ == "__main__":
    main()
