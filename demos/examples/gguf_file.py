"""
A file of llama.cpp, which transformers loads and unpacks: it is enabled as any other model, and as fast.

    python demos/examples/gguf_file.py FILE.gguf

Without FILE, that of SmolLM2-135M-Instruct in Q4_1, which `make setup` fetches.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

import hf_smartspec
from hf_smartspec.commands.common.real_model import FILE

QUESTION = "Repeat this, and change nothing: The committee will meet on Friday at nine in the small hall."


def main(file: Path = FILE) -> tuple[Any, Any, hf_smartspec.GenerationStatistics]:
    """Return the outputs without and with speculation, and print how much was drafted."""
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    config = GgufConfig(dequantize=True)  # plain linear layers on every device, whatever kernels are installed
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, quantization_config=config, dtype=torch.float32
    )
    sizes = [f"{size / 2**20:.0f} MiB" for size in (file.stat().st_size, model.get_memory_footprint())]
    print(f"{sizes[0]} of {file.name} are unpacked into {sizes[1]} of {str(model.dtype).removeprefix('torch.')}.")
    chat = [{"role": "user", "content": QUESTION}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    arguments = {**inputs, "max_new_tokens": 32, "do_sample": False}
    plain = model.generate(**arguments).tolist()

    hf_smartspec.enable(model, assistant="auto")  # the line
    fast = model.generate(**arguments).tolist()

    statistics = model.smartspec_statistics.total
    print(f"The same without speculation: {plain == fast}.")
    print(f"{statistics.acceptance_rate:.0%} of {statistics.drafted_tokens} drafted tokens accepted")
    return plain, fast, statistics


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
