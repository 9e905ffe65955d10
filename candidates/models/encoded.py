"""What draft models make of what the encoder of a target has read."""

import inspect
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from ...target_model.encoded import EncodedForward, masks_encoder
from ...target_model.layout.rows import CacheRow
from ..encoder_inputs import EncoderInputs


def reads_encoder(model: PreTrainedModel) -> bool:
    """Whether a draft model looks at an encoder's outputs: of its own, or, as `WhisperForCausalLM`, of the target's."""
    return model.config.is_encoder_decoder or "encoder_outputs" in inspect.signature(model.forward).parameters


class EncodedRows:
    """
    A draft model's rows behind an encoder: all rows of a call are read at once, when the first of them drafts.

    Args:
        model (`PreTrainedModel`): With an encoder, which reads what the target's has read, or a decoder that looks at
            the outputs of the target's.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self._told: dict[Hashable, tuple[EncoderInputs, int]] = {}  # and the number of the request's row
        self._waiting: dict[Hashable, CacheRow] = {}  # for their requests to begin
        self._begun: set[Hashable] = set()

    @property
    def is_told(self) -> bool:
        """Whether there are requests behind an encoder."""
        return bool(self._told)

    def tell(self, rows: Mapping[Hashable, int], inputs: EncoderInputs) -> None:
        self._told.update((name, (inputs, number)) for name, number in rows.items())

    def row(self, request_id: Hashable, forward: EncodedForward) -> CacheRow:
        """
        The request's row of the forward.

        Raises:
            ValueError: if nobody has said what it reads.
        """
        if request_id not in self._told:
            raise ValueError(f"{type(self.model).__name__} has an encoder, and nobody has said what it is to read")
        if request_id not in self._waiting:
            inputs = self._told[request_id][0]
            numbers = {
                name: number
                for name, (item, number) in self._told.items()
                if item is inputs and name not in self._begun
            }
            self._waiting.update(zip(numbers, self._read(inputs, list(numbers.values()), forward)))
        self._begun.add(request_id)
        return self._waiting.pop(request_id)

    def stop(self, request_id: Hashable, forward: EncodedForward | None) -> None:
        self._told.pop(request_id, None)
        self._begun.discard(request_id)
        row = self._waiting.pop(request_id, None)
        if row is not None and forward is not None:
            forward.remove(row)

    def renew(self) -> None:
        """All rows are gone, and are asked for anew."""
        self._waiting.clear()
        self._begun.clear()

    @torch.no_grad()
    def _read(self, inputs: EncoderInputs, numbers: list[int], forward: EncodedForward) -> list[CacheRow]:
        states = self._states(inputs)
        mask = inputs.mask if masks_encoder(self.model) else None
        if len(numbers) < len(states):
            states, mask = states[numbers], None if mask is None else mask[numbers]
        return forward.encode(BaseModelOutput(states), mask)

    def _states(self, inputs: EncoderInputs) -> torch.Tensor:
        """What the model's decoder looks at, `[rows, length, hidden_size]`."""
        model: Any = self.model
        if not model.config.is_encoder_decoder:
            return inputs.outputs[0].to(model.device, model.dtype)
        encoder = model.get_encoder()
        names = inspect.signature(encoder.forward).parameters
        kwargs = {name: item.to(model.device) for name, item in inputs.arguments.items() if name in names}
        if model.main_input_name not in kwargs:
            raise ValueError(
                f"the encoder of {type(model).__name__} reads `{model.main_input_name}`, which the call has not brought"
            )
        if kwargs[model.main_input_name].is_floating_point():
            kwargs[model.main_input_name] = kwargs[model.main_input_name].to(model.dtype)
        return inputs.per_row(encoder(**kwargs, return_dict=True)[0])
