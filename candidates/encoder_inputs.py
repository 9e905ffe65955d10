"""What the encoder of a call's target has read."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from transformers.modeling_outputs import BaseModelOutput


@dataclass(frozen=True, eq=False)
class EncoderInputs:
    """
    What the encoder in front of a call's target has read, and left behind, for all rows of the call.

    Args:
        outputs (`BaseModelOutput`): What it has left; the first item is of shape `[rows, length, hidden_size]`.
        mask (`torch.Tensor` of shape `[rows, length]`, *optional*): `attention_mask` of the call; 0 where nobody looks.
        arguments (`dict` of `str` to `torch.Tensor`): What its forward was given (`input_ids`, `input_features`, ...),
            of `1 / n` of the rows where the call asks for `n` sequences of each. Empty where the caller of `generate`
            has brought the outputs along.
    """

    outputs: BaseModelOutput
    mask: torch.Tensor | None
    arguments: Mapping[str, torch.Tensor]

    @property
    def num_rows(self) -> int:
        return len(self.outputs[0])

    def per_row(self, states: torch.Tensor) -> torch.Tensor:
        """States of what was read `[rows / n, ...]`, once for each row of the call."""
        num_repeats = self.num_rows // len(states)
        return states if num_repeats == 1 else states.repeat_interleave(num_repeats, dim=0)

    def texts(self) -> list[np.ndarray] | None:
        """Of every row, the tokens that the encoder has read; None if it reads no tokens."""
        ids = self.arguments.get("input_ids")
        if ids is None:
            return None
        mask = self.arguments.get("attention_mask")
        mask = torch.ones_like(ids) if mask is None or mask.shape != ids.shape else mask
        texts = [row[seen] for row, seen in zip(ids.cpu().numpy(), mask.bool().cpu().numpy())]
        return [text for text in texts for _ in range(self.num_rows // len(texts))]
