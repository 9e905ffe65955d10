"""The EAGLE-3 heads that lie in the repository draft for the real model."""

import json
from pathlib import Path

import torch

import hf_smartspec

DEMOS = Path(__file__).resolve().parents[1] / "demos"
KINDS = ("math", "code", "edit")  # of prompts that the heads have not seen


def test_the_heads_are_exact_and_save_every_second_forward(real_model, real_tokenizer):
    model = real_model(torch.float32)
    drafts = hf_smartspec.SmartSpecConfig(str(DEMOS / "models" / "smollm2-eagle3"), num_nodes=5, width=1)
    lines = (DEMOS / "real_prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = {row["category"]: row["prompt"] for row in map(json.loads, reversed(lines))}  # the first of each kind
    num_tokens = num_steps = 0
    for kind in KINDS:
        chat = [{"role": "user", "content": prompts[kind]}]
        inputs = real_tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        plain = model.generate(**inputs, do_sample=False, max_new_tokens=32)
        with hf_smartspec.enabled(model):
            fast = model.generate(**inputs, assistant=drafts, do_sample=False, max_new_tokens=32)
            done = model.smartspec_statistics.last
        assert torch.equal(plain, fast)
        num_tokens, num_steps = num_tokens + done.generated_tokens, num_steps + done.steps
    assert num_tokens >= 2 * num_steps
