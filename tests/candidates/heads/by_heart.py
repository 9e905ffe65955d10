"""Heads of EAGLE-3 that know by heart what a model says."""

import torch
from transformers import PreTrainedModel

from hf_smartspec.candidates.heads.eagle.heads import EagleHeads
from hf_smartspec.training.eagle import EagleTraining, new_heads
from hf_smartspec.training.texts import Text, collate


def texts_of(model: PreTrainedModel, inputs: dict[str, torch.Tensor], num_tokens: int) -> list[Text]:
    """What it says, greedily, behind each prompt."""
    width = inputs["input_ids"].shape[1]
    output = model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False, eos_token_id=None)
    prompts = [row[mask.bool()] for row, mask in zip(*inputs.values())]
    return [Text(prompt.numpy(), row[width:].numpy()) for prompt, row in zip(prompts, output)]


def trained_eagle(
    model: PreTrainedModel, texts: list[Text], steps: int = 80, token_ids: torch.Tensor | None = None
) -> EagleHeads:
    """Some steps of training, all texts at once. torch's global generators stay as they are."""
    training = EagleTraining(model, new_heads(model, token_ids, neurons=64), num_steps=4)
    batch = collate([text.example(1000) for text in texts])
    optimizer = torch.optim.AdamW(training.parameters(), lr=4e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        training(**batch)["loss"].backward()
        optimizer.step()
    return training.heads.requires_grad_(False)
