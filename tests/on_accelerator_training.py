"""Training on an accelerator: the same loss as on the CPU, with no wait for the device once its work has begun."""

from contextlib import nullcontext

import pytest
import torch

from hf_smartspec.training.blocks import BlockTraining
from hf_smartspec.training.eagle import EagleTraining, new_heads
from hf_smartspec.training.new_blocks import new_drafter
from hf_smartspec.training.texts import Text, collate

from .accelerator import DEVICE, Accelerator
from .generate.helpers import noisy_copy
from .models import new_model
from .training.test_medusa import MAX_LENGTH, texts_of

OWN = torch.arange(20, 90)  # tokens that are drafted


def training(target, kind: str) -> torch.nn.Module:
    if kind == "eagle3":
        return EagleTraining(target, new_heads(target, OWN), num_steps=3)
    return BlockTraining(target, new_drafter(target, 96, kind, block_size=4, num_layers=1, token_ids=OWN), num_blocks=4)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark"])
def test_an_update_waits_for_the_device_before_its_work_only(kind, monkeypatch):
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # of float32: the device knows none
    target, texts = new_model("llama"), texts_of(3)
    texts[1] = Text(texts[1].prompt, texts[1].response[:9])  # beside padding
    batch = collate([item.example(MAX_LENGTH) for item in texts])
    expected = training(target, kind).eval()(**batch)["loss"]
    with Accelerator() as accelerator:
        module = training(noisy_copy(target, 0.0).to(DEVICE), kind).eval()
        sent = {name: item.to(DEVICE) for name, item in batch.items()}
        module(**sent)  # the first sends rotary frequencies
        with accelerator.counting() as counts:
            found = module(**sent)["loss"]
        assert counts["waits"] == 2, "for the labels, and where transformers looks for packed texts"
        torch.testing.assert_close(found.cpu(), expected)
