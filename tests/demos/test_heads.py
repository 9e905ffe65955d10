"""The heads that lie beside the embedded target draft for it."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_smartspec
from hf_smartspec import EagleHeads, MedusaHeads, SmartSpecConfig
from hf_smartspec.candidates.heads.kinds import load

DEMOS = Path(__file__).resolve().parents[2] / "demos"
KINDS = {"eagle3": EagleHeads, "medusa": MedusaHeads}


@pytest.fixture(scope="module")
def target():
    return AutoModelForCausalLM.from_pretrained(DEMOS / "models/target", dtype=torch.float32)


@pytest.fixture(scope="module")
def prompt():
    rows = [json.loads(line) for line in (DEMOS / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    messages = [{"role": "user", "content": next(row["prompt"] for row in rows if row["category"] == "math")}]
    tokenizer = AutoTokenizer.from_pretrained(DEMOS / "models/target")
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)


@pytest.mark.parametrize("kind", KINDS)
def test_shipped_heads_are_right_more_often_than_not(target, prompt, kind):
    folder = DEMOS / "models" / kind
    assert type(load(str(folder), target)) is KINDS[kind]
    options = {"max_new_tokens": 32, "do_sample": False, "return_dict_in_generate": True}
    with hf_smartspec.enabled(target):
        expected = target.generate(**prompt, **options, assistant="none")
        found = target.generate(**prompt, **options, assistant=SmartSpecConfig(str(folder), num_nodes=4))
    assert torch.equal(found.sequences, expected.sequences)
    counts = found.statistics
    assert counts.accepted_tokens > counts.steps / 2, "most steps accept some token"
