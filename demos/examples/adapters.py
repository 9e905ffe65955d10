"""
PEFT: a target with LoRA adapters, switched, switched off and merged, in `generate` and in an `Engine`.

    pip install peft
    python demos/examples/adapters.py
"""

import copy
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_smartspec

MODEL = Path(__file__).resolve().parents[1] / "models/target"
PROMPTS = ["def add(a, b):", "SELECT name FROM users WHERE"]
# Adapters that change something without any training, which is all that is asked of them here.
CONFIG = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=1, target_modules="all-linear", init_lora_weights=False)


def answers(tuned: Any, inputs: Any) -> dict[str, list[list[int]]]:
    """What the model generates with each of its adapters, without, and with one merged into its weights."""

    def generate(model: Any) -> list[list[int]]:
        return model.generate(**inputs, max_new_tokens=32, do_sample=False).tolist()

    found = {}
    for name in ("first", "second"):
        tuned.set_adapter(name)
        found[name] = generate(tuned)
    with tuned.disable_adapter():
        found["none"] = generate(tuned)
    found["second, merged"] = generate(copy.deepcopy(tuned).merge_and_unload())
    return found


def main() -> tuple[Any, Any, hf_smartspec.GenerationStatistics]:
    """Return the outputs without and with speculation, and print how much was drafted."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    torch.manual_seed(0)
    tuned = get_peft_model(model, CONFIG, adapter_name="first")
    tuned.add_adapter("second", CONFIG)
    inputs = tokenizer(PROMPTS, padding=True, return_tensors="pt").to(model.device)
    plain = answers(tuned, inputs)

    hf_smartspec.enable(tuned, assistant="auto")  # the line
    fast = answers(tuned, inputs)

    with hf_smartspec.Engine(tuned, assistant="auto", tokenizer=tokenizer) as engine:
        for name in ("first", "second"):  # what was computed with the one is not used for the other
            with engine.pause():
                tuned.set_adapter(name)
            outputs = engine.generate(PROMPTS, max_new_tokens=32, do_sample=False)
            print(f"{name}: {tokenizer.decode(outputs[0].generated_tokens)!r}")

    statistics = model.smartspec_statistics.total
    print(f"The same without speculation: {plain == fast}.")
    print(f"{statistics.acceptance_rate:.0%} of {statistics.drafted_tokens} drafted tokens accepted")
    return plain, fast, statistics


if __name__ == "__main__":
    main()
