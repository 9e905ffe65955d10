"""
One target in two processes, each with a half of every weight:

    torchrun --nproc-per-node 2 demos/examples/tensor_parallel.py

On GPUs, each process takes one of its own.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_smartspec import Engine, enable

MODELS = Path(__file__).parents[1] / "models"


def main() -> int:
    target = sys.argv[1] if len(sys.argv) > 1 else str(MODELS / "target")
    draft = sys.argv[2] if len(sys.argv) > 2 else str(MODELS / "draft")
    model = enable(AutoModelForCausalLM.from_pretrained(target, tp_plan="auto", dtype=torch.float32))
    tokenizer = AutoTokenizer.from_pretrained(target)
    inputs = tokenizer("def fib(n):", return_tensors="pt").to(model.device)
    plain = model.generate(**inputs, max_new_tokens=48, do_sample=False, assistant="none")
    drafted = model.generate(**inputs, max_new_tokens=48, do_sample=False, assistant=draft)
    with Engine(model, ["suffix", draft], tokenizer=tokenizer) as engine:  # the same requests in every process
        outputs = engine.generate(["def fib(n):", "1, 2, 3,"], max_new_tokens=32)
    if dist.get_rank() == 0:
        print(tokenizer.decode(drafted[0], skip_special_tokens=True))
        print(f"the same tokens: {torch.equal(plain, drafted)}; {len(outputs)} requests served")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
