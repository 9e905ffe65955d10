"""Training texts of drafters as token ids, and their batches."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..device import to_device

IGNORED = -100


class Text(NamedTuple):
    """A request and its response as token ids, int64 `[n]` each. Drafters learn to predict responses."""

    prompt: np.ndarray
    response: np.ndarray

    def example(self, max_length: int) -> dict[str, torch.Tensor]:
        """Return `input_ids` and `labels`, `[n]` each; the prompt's are ignored. Long prompts are cut at the start."""
        response = self.response[:max_length]
        prompt = self.prompt[max(len(self.prompt) + len(response) - max_length, 0) :]
        ids = torch.from_numpy(np.concatenate([prompt, response]))
        labels = ids.clone()
        labels[: len(prompt)] = IGNORED
        return {"input_ids": ids, "labels": labels}


def collate(examples: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """
    Return examples as one batch `[rows, length]`, padded on the right: under a causal mask no token attends to the
    padding, and its labels are ignored.
    """
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad([item["input_ids"] for item in examples], batch_first=True),
        "labels": pad([item["labels"] for item in examples], batch_first=True, padding_value=IGNORED),
    }


def send(places: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the host on a device, without waiting for what is queued there."""
    return to_device(places.numpy(), device)


def chosen(items: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """
    Return the items `[n, ...]` of a batch `[rows, length, ...]` in n places.

    Args:
        where (`torch.Tensor` of shape `[rows, length]`, bool): A mask of these places, on the host. By a mask of its
            own, a GPU would be waited for, since the result's size would depend on it.
    """
    return items.flatten(0, 1).index_select(0, send(where.flatten().nonzero()[:, 0], items.device))


def split(texts: Sequence[Text], part: float, seed: int = 0) -> tuple[list[Text], list[Text]]:
    """
    Split texts into those to train on and a part that is held out, at least one each. Texts with the same prompt stay
    together.

    Raises:
        ValueError: for fewer than two different prompts.
    """
    prompts = sorted({item.prompt.tobytes() for item in texts})
    if len(prompts) < 2:
        raise ValueError(
            f"There must be at least two different prompts, one of them to be held out, got {len(prompts)}."
        )
    order = np.random.default_rng(seed).permutation(len(prompts))
    num = min(max(round(part * len(prompts)), 1), len(prompts) - 1)
    held_out = {prompts[index] for index in order[:num]}
    return (
        [item for item in texts if item.prompt.tobytes() not in held_out],
        [item for item in texts if item.prompt.tobytes() in held_out],
    )
