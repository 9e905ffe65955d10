"""
lm-evaluation-harness with `--model hf`: the same scores, with one line more. From the repository's root:

    pip install "lm-eval[hf]"
    python demos/examples/evaluate.py
"""

import time
from pathlib import Path
from typing import Any

import lm_eval
import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_smartspec

MODEL = Path(__file__).resolve().parents[1] / "models/target"
TASKS = Path(__file__).with_name("harness")


def evaluate(model: HFLM, limit: int) -> tuple[float, list[str], float]:
    """The score, the responses, and the seconds that it took."""
    manager = TaskManager(include_path=str(TASKS), include_defaults=False)
    start = time.perf_counter()
    found: Any = lm_eval.simple_evaluate(
        model, tasks=["prompts"], task_manager=manager, limit=limit, bootstrap_iters=0, apply_chat_template=True
    )
    seconds = time.perf_counter() - start
    responses = [sample["resps"][0][0] for sample in found["samples"]["prompts"]]
    return found["results"]["prompts"]["chrf,none"], responses, seconds


def main(limit: int = 12) -> tuple[Any, Any, hf_smartspec.GenerationStatistics]:
    """Return the outputs without and with speculation, and print how much was drafted."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    wrapped = HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(MODEL), batch_size=4)
    *plain, seconds = evaluate(wrapped, limit)

    hf_smartspec.enable(model, assistant="auto")  # the line
    *fast, fewer = evaluate(wrapped, limit)

    statistics = model.smartspec_statistics.total
    print(f"chrF {plain[0]:.2f} and {fast[0]:.2f}, the same responses: {plain == fast}")
    print(f"{seconds:.1f} s without speculation, {fewer:.1f} s with it")
    print(f"{statistics.acceptance_rate:.0%} of {statistics.drafted_tokens} drafted tokens accepted")
    return plain, fast, statistics


if __name__ == "__main__":
    main()
