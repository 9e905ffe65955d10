"""
GRPO by TRL with speculated rollouts: the same training, with one line more. Completions and losses are those of
`--assistant none`, bit for bit.

    pip install "hf-smartspec[rl]"
    python demos/examples/grpo.py --assistant online
"""

import argparse
import json
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import hf_smartspec

DEMOS = Path(__file__).resolve().parents[1]


def reward(completions: list[Any], **_: Any) -> list[float]:
    """Short answers to problems of arithmetic, which end in #### and a number."""
    texts = [item[-1]["content"] for item in completions]
    return [bool(re.search(r"#### -?\d+\s*$", text)) - len(text) / 1000 for text in texts]


def assistant_of(name: str) -> Any:
    """What drafts: suffix trees know siblings and earlier epochs; drafts can learn from rollouts."""
    if name in ("none", "suffix"):
        return name
    draft = AutoModelForCausalLM.from_pretrained(DEMOS / "models/draft", dtype=torch.float32)
    if name == "draft":
        return ["suffix", draft]
    online = hf_smartspec.OnlineDistillation(background=False)  # learns where rollouts end: repeatable
    return hf_smartspec.SmartSpecConfig(["suffix", draft], online=online)


def main(argv: Sequence[str] | None = None) -> GRPOTrainer:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assistant", choices=["none", "suffix", "draft", "online"], default="online")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--generations", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    args = parser.parse_args(argv)

    rows = [json.loads(line) for line in (DEMOS / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    prompts = [row["prompt"] for row in rows if row["category"] == "math"][: args.prompts]
    policy = AutoModelForCausalLM.from_pretrained(DEMOS / "models/target", dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=policy,
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=args.generations,
                num_generations=args.generations,
                max_completion_length=args.max_new_tokens,
                num_train_epochs=args.epochs,
                learning_rate=5e-5,
                bf16=False,
                use_cpu=not torch.cuda.is_available(),
                logging_steps=1,
                save_strategy="no",
                report_to=[],
            ),
            train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": item}]} for item in prompts]),
            processing_class=AutoTokenizer.from_pretrained(DEMOS / "models/target"),
        )
        hf_smartspec.enable(policy, assistant=assistant_of(args.assistant))  # the line
        trainer.train()
    total = policy.smartspec_statistics.total
    print(f"{total.mean_accepted_length:.2f} tokens per step, {total.acceptance_rate:.0%} of drafted tokens accepted")
    return trainer


if __name__ == "__main__":
    main()
