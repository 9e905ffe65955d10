"""What tests of commands share."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from hf_smartspec.commands import main as cli

from ..candidates.heads.fitted import fitted_heads
from ..folders import byte_tokenizer

EMBEDDED = Path(__file__).parents[2] / "demos" / "models" / "target"


def call(*arguments):
    """Exit status of one command line."""
    try:
        return cli.main([str(argument) for argument in arguments])
    except SystemExit as error:
        return error.code


def save_fitted_heads(folder: Path, prompts: Sequence[str], num_tokens: int = 12) -> Path:
    """`medusa`, of the `target` there: they know what it says behind these prompts, which are equally long."""
    target = AutoModelForCausalLM.from_pretrained(folder / "target")
    ids = byte_tokenizer()(list(prompts), return_tensors="pt")["input_ids"]
    texts = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, eos_token_id=None)
    fitted_heads(target, texts).save_pretrained(folder / "medusa")
    return folder / "medusa"
