"""What encoders of tiny models read."""

import numpy as np
import torch

from ...models import SPEECH, VOCAB_SIZE

MEL_BINS, NUM_FRAMES = 8, 40


def encoder_inputs(architecture: str, rng: np.random.Generator, lengths: list[int]) -> dict[str, torch.Tensor]:
    """Texts of these lengths, padded on either side, some with a hole; or as many clips, which are of one length."""
    if architecture in SPEECH:
        features = rng.normal(size=(len(lengths), MEL_BINS, NUM_FRAMES))
        return {"input_features": torch.from_numpy(features).float()}
    width = max(lengths)
    ids = torch.from_numpy(rng.integers(3, VOCAB_SIZE, (len(lengths), width)))
    is_left = rng.random() < 0.5
    mask = torch.tensor([[0] * (width - n) + [1] * n if is_left else [1] * n + [0] * (width - n) for n in lengths])
    if width > 4 and rng.random() < 0.3:
        mask[lengths.index(width), 2] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}
