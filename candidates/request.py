"""A request in the form that sources get."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import LogitsProcessorList
from transformers.modeling_outputs import BaseModelOutput

if TYPE_CHECKING:
    from ..target_model.layout.rows import CacheRow


@dataclass(frozen=True, eq=False)
class EncoderInputs:
    """
    Inputs and outputs of the encoder of a call's target, for all rows of the call.

    Args:
        outputs (`BaseModelOutput`): Its outputs; the first item is of shape `[rows, length, hidden_size]`.
        mask (`torch.Tensor` of shape `[rows, length]`, *optional*): `attention_mask` of the call; 0 for padding.
        arguments (`dict` of `str` to `torch.Tensor`): Arguments of its forward (`input_ids`, `input_features`, ...),
            for `1 / n` of the rows where the call asks for `n` sequences of each. Empty where the caller of `generate`
            passed the outputs.
    """

    outputs: BaseModelOutput
    mask: torch.Tensor | None
    arguments: Mapping[str, torch.Tensor]

    @property
    def num_rows(self) -> int:
        return len(self.outputs[0])

    def per_row(self, states: torch.Tensor) -> torch.Tensor:
        """Repeat states of the encoder's inputs `[rows / n, ...]` once for each row of the call."""
        num_repeats = self.num_rows // len(states)
        return states if num_repeats == 1 else states.repeat_interleave(num_repeats, dim=0)

    def texts(self) -> list[np.ndarray] | None:
        """Return the tokens that the encoder has read for every row; None if it reads no tokens."""
        ids = self.arguments.get("input_ids")
        if ids is None:
            return None
        mask = self.arguments.get("attention_mask")
        mask = torch.ones_like(ids) if mask is None or mask.shape != ids.shape else mask
        texts = [row[seen] for row, seen in zip(ids.cpu().numpy(), mask.bool().cpu().numpy())]
        return [text for text in texts for _ in range(self.num_rows // len(texts))]


@dataclass(eq=False)
class SourceRequest:
    """
    A request with everything that a source can use of it when it begins.

    Args:
        request_id (`Hashable`): The name of the request in all further calls.
        prompt (`np.ndarray` of shape `[prompt_len]`, int64): The prompt without padding; valid and unchanged until
            `stop`.
        tag (`str`, *optional*): The kind of text, where the caller names one.
        namespace (`Hashable`): Namespace whose outputs the request drafts from, and which its own output joins.
        reads (sequence of `Hashable`): Further namespaces that it drafts from.
        references (sequence of `np.ndarray`, int): Token ids of texts that the answer is likely to repeat, such as a
            file to be edited, a predicted output, retrieved passages, or the text that the target's encoder has read.
            They feed this request only.
        processors (`LogitsProcessorList`): The target's, through which it picks tokens.
        seed (`int`, *optional*): Seed of the noise by which the target samples; None for greedy requests. A source may
            propose the tokens that the *noisy* target would pick.
        forward (`ModelForward`, *optional*): The target's forward; None where there is no target, as in simulations.
        row (`CacheRow`, *optional*): The row of the target's cache that holds the request's keys and values. A source
            may write beyond the row's length, and must leave the row as it was. A suspended request goes on in another
            row, which is then set here.
        encoder_inputs (`EncoderInputs`, *optional*): Inputs and outputs of the target's encoder for all rows of a call.
        encoder_row (`int`): The request's row among these.
        encoded_text (`np.ndarray` of shape `[length]`, int64, *optional*): The tokens that the encoder has read, if
            these are tokens.
        num_cached (`int`): Tokens of the prompt whose keys and values are in the row already, so that the target's
            forward over them is skipped; see `TreeCandidateGenerator.begin`.
        shares_with (`Hashable`, *optional*): The request that these keys and values were computed for, which runs or
            has ended, and which other sources may have drafted for. None for a cache that the caller passed in.
        on_release (list of `Callable`): Called without arguments when the request's own keys and values are gone, some
            time after `stop`: until then, later requests may name it in `shares_with`. A source that keeps state that
            long appends to the list in `begin`.
    """

    request_id: Hashable
    prompt: np.ndarray
    tag: str | None = None
    namespace: Hashable = ""
    reads: Sequence[Hashable] = ()
    references: Sequence[np.ndarray] = ()
    processors: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    seed: int | None = None
    forward: Any = None
    row: "CacheRow | None" = None
    encoder_inputs: EncoderInputs | None = None
    encoder_row: int = 0
    encoded_text: np.ndarray | None = None
    num_cached: int = 0
    shares_with: Hashable | None = None
    on_release: list[Callable[[], object]] = field(default_factory=list)

    @property
    def subject(self) -> np.ndarray:
        """The text that the request is about: what the target's encoder has read, or the prompt."""
        return self.prompt if self.encoded_text is None else self.encoded_text
