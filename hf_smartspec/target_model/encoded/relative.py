"""Position biases that depend on the distance between two tokens, as in T5, for the trees of a packed step."""

from collections.abc import Sequence

import torch

from ..layout.step_layout import PaddedPart


class RelativeBias:
    """
    Biases that T5's decoders add to the scores of a packed step. The models' own `compute_bias` counts positions by
    columns; here they are those of the tree: the root's, plus depth.

    Args:
        parts (sequence of `PaddedPart`): Parts of the step.
    """

    def __init__(self, parts: Sequence[PaddedPart]):
        self._num_columns = max([part.num_columns for part in parts])
        self._latest: torch.nn.Module | None = None
        self._biases: dict[tuple[torch.nn.Module, int], torch.Tensor] = {}

    def enter(self, module: torch.nn.Module) -> None:
        """
        Begin a layer's attention, with biases of its own, or else with those of the latest layer that has some (of the
        first, in T5).

        Raises:
            NotImplementedError: if the biases are not T5's.
        """
        if getattr(module, "has_relative_attention_bias", False):
            self._latest = module
        if self._latest is None or not hasattr(self._latest, "compute_bias"):
            raise NotImplementedError(f"The position biases of {type(module).__name__} are not supported.")

    def of(self, part: PaddedPart) -> torch.Tensor:
        """Return the bias of a part's scores, `[R, heads, S, K]`."""
        assert self._latest is not None, "no layer has been entered"
        key = self._latest, id(part)
        if key not in self._biases:
            by_distance = self._by_distance(self._latest)
            self._biases[key] = by_distance[part.distances()].permute(0, 3, 1, 2)
        return self._biases[key]

    def _by_distance(self, module: torch.nn.Module) -> torch.Tensor:
        """Return the bias by distance of a token before the query, `[columns, heads]`, as the model computes it."""
        num = self._num_columns
        bias = module.compute_bias(1, num, past_seen_tokens=num - 1)  # type: ignore[operator]
        return bias[0, :, 0].flip(-1).transpose(0, 1).contiguous()
