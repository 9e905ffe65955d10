"""
Weights of 8 and 4 bits on the CPU, by bitsandbytes and by torchao: speculation gives what the quantized model gives.

    pip install "hf-smartspec[quantization]" torchao
    python demos/examples/quantized.py
"""

import argparse
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, TorchAoConfig

import hf_smartspec

MODEL = Path(__file__).resolve().parents[1] / "models/target"
PROMPTS = ["def add(a, b):", "SELECT name FROM users WHERE"]


def torchao_config(name: str, **options: Any) -> TorchAoConfig:
    from torchao import quantization

    return TorchAoConfig(getattr(quantization, name)(**options))


CONFIGS: dict[str, Callable[[], Any]] = {
    # With the default threshold, what counts as an outlier depends on all tokens that run at once.
    "bitsandbytes, 8 bits": lambda: BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0),
    "bitsandbytes, 4 bits": lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32),
    "torchao, weights of 8 bits": lambda: torchao_config("Int8WeightOnlyConfig"),
    "torchao, weights of 8 bits in float": lambda: torchao_config("Float8WeightOnlyConfig"),
    "torchao, 8 bits": lambda: torchao_config("Int8DynamicActivationInt8WeightConfig"),
}


def main(argv: Sequence[str] | None = None) -> tuple[Any, Any, hf_smartspec.GenerationStatistics]:
    """Return the outputs without and with speculation, and print how much was drafted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--by", choices=["bitsandbytes", "torchao"], help="default: both")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    args = parser.parse_args(argv)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns at every product of float32
    inputs = AutoTokenizer.from_pretrained(MODEL)(PROMPTS, padding=True, return_tensors="pt")
    arguments = {**inputs, "max_new_tokens": args.max_new_tokens, "do_sample": False}

    plain, fast, statistics = {}, {}, hf_smartspec.GenerationStatistics()
    for name, config in CONFIGS.items():
        if not name.startswith(args.by or ""):
            continue
        model = AutoModelForCausalLM.from_pretrained(
            MODEL, dtype=torch.float32, device_map="cpu", quantization_config=config()
        )
        plain[name] = model.generate(**arguments).tolist()
        hf_smartspec.enable(model, assistant="auto")  # the line
        fast[name] = model.generate(**arguments).tolist()
        statistics += model.smartspec_statistics.total
        last = model.smartspec_statistics.last
        print(f"{name}: the same {plain[name] == fast[name]}, {last.acceptance_rate:.0%} of drafted tokens accepted")
    return plain, fast, statistics


if __name__ == "__main__":
    main()
