"""Rows of draft models that attend to the outputs of an encoder."""

import inspect
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from ...target_model.encoded import EncodedForward, masks_encoder
from ...target_model.layout.rows import CacheRow
from ..request import EncoderInputs


def reads_encoder(model: PreTrainedModel) -> bool:
    """
    Return whether a draft model uses an encoder's outputs: its own encoder's, or, as `WhisperForCausalLM`, the
    target's.
    """
    return model.config.is_encoder_decoder or "encoder_outputs" in inspect.signature(model.forward).parameters


class EncodedRows:
    """
    A draft model's rows with encoder outputs. All rows of a call are encoded at once, when the first of them begins.

    Args:
        model (`PreTrainedModel`): With an encoder, which reads what the target's has read, or a decoder that looks at
            the outputs of the target's.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self._states: WeakKeyDictionary[EncoderInputs, torch.Tensor] = WeakKeyDictionary()  # as long as calls run

    @torch.no_grad()
    def add(self, inputs: EncoderInputs, number: int, forward: EncodedForward) -> CacheRow:
        """
        Return a new row of the draft model's forward, for the row of this number of a call.

        Raises:
            ValueError: if the call has not brought what the draft model's encoder reads.
        """
        if inputs not in self._states:
            self._states[inputs] = self._read(inputs)
        one = slice(number, number + 1)
        mask = inputs.mask[one] if inputs.mask is not None and masks_encoder(self.model) else None
        (row,) = forward.encode(BaseModelOutput(self._states[inputs][one]), mask)
        return row

    def renew(self) -> None:
        """Encode everything anew, after the draft model's weights have changed."""
        self._states.clear()

    def _read(self, inputs: EncoderInputs) -> torch.Tensor:
        """Return the encoder outputs that the draft model's decoder attends to, `[rows, length, hidden_size]`."""
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
