"""From the arguments of a request to a call that is ready for the loop."""

from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationMixin, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase

from ..decoding.call import DecodingCall
from ..device import without_autocast
from ..prepare.arguments import check_arguments
from ..prepare.call import PreparedCall, prepare_call
from ..prepare.config import SmartSpecConfig
from ..prepare.encoders import placeholder_outputs
from ..prepare.entry import assistant_of, without_assistant
from ..prepare.sources import Assistant, Drafters, resolve, tagged
from ..target_model.compat import num_positions
from .logprobs import LogprobsRecorder
from .memory.base import RequestMemory

# Arguments of `generate` that the engine sets itself, and those that it serves with these values only.
_SET_BY_ENGINE = ("inputs", "attention_mask", "cache", "past_key_values", "inputs_embeds", "encoder_outputs")
_OUTPUTS = ("return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states")
_SERVED_AS = {"num_return_sequences": 1} | dict.fromkeys(_OUTPUTS, False)


class RequestPreparation:
    """
    Prepares an engine's requests by transformers' `generate`.

    Args:
        model (`PreTrainedModel`): The target.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Serves `stop_strings`.
        assistant (`Assistant`): The drafter of requests that name none.
        drafters (`Drafters`): Drafters that requests have named before.
        memory (`RequestMemory`): Where keys and values are stored.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        assistant: Assistant,
        drafters: Drafters,
        memory: RequestMemory,
    ):
        self.model, self.tokenizer, self.memory = model, tokenizer, memory
        self.assistant, self.drafters = assistant, drafters

    def call_of(
        self,
        ids: torch.Tensor,
        assistant: Any,
        seed: int | None,
        kwargs: dict[str, Any],
        tag: str | None = None,
        recorder: LogprobsRecorder | None = None,
    ) -> DecodingCall:
        """
        Return a request of the prompt `ids`, `[1, length]` int64, ready for the loop; for the others, see
        `Engine.add_request`.
        """
        for name in (*_SET_BY_ENGINE, *_SERVED_AS):
            given = kwargs.get(name)
            if given is not None and (name in _SET_BY_ENGINE or given != _SERVED_AS[name]):
                raise ValueError(f"`{name}` cannot be served by an engine: leave it out, or use `model.generate`.")
        ids = ids.to(self.model.device)
        to_read = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        kwargs = {"tokenizer": self.tokenizer, **kwargs, **to_read}
        if self.model.config.is_encoder_decoder:
            kwargs |= placeholder_outputs(self.model, ids)
        choice = tagged(self._choice(assistant, kwargs.get("generation_config")), tag)
        arguments, config = check_arguments(self.model, without_assistant(kwargs), choice, seed)
        resolved = resolve(config, self.model, self.drafters)

        def custom_generate(model: PreTrainedModel, input_ids: torch.LongTensor, **prepared: Any) -> DecodingCall:
            options: dict[str, Any] = {"assistant": resolved, "seed": seed, "encoder_arguments": to_read}
            options["streamer"] = arguments.get("streamer")  # which transformers drops on the way to a callable
            return self._finished(prepare_call(model, input_ids, **options, **prepared), recorder)

        with without_autocast(self.model.device):  # as in the engine's thread, which runs the request
            call: Any = GenerationMixin.generate(self.model, **arguments | {"custom_generate": custom_generate})
        return call

    def _choice(self, assistant: Any, config: Any) -> Any:
        """Return the drafter that the request or its `generation_config` names, or else the engine's own."""
        if assistant is None:
            assistant = assistant_of(config)
        if isinstance(assistant, SmartSpecConfig) and assistant.policy is not None:
            raise ValueError(
                "A `policy` decides for all requests of an engine: pass it in the `assistant` of the engine."
            )
        return self.assistant if assistant is None else assistant

    def _finished(self, prepared: PreparedCall, recorder: LogprobsRecorder | None) -> DecodingCall:
        if len(prepared.input_ids) != 1:
            raise ValueError("`num_return_sequences` must be 1 in an engine: add the request several times.")
        if recorder is not None:  # after all other processors
            processors = LogitsProcessorList([*prepared.logits_processor, recorder])
            prepared = replace(prepared, logits_processor=processors)
        return self.memory.call_of(prepared)


def check_positions(model: PreTrainedModel, num_tokens: int, of_decoder: bool = True) -> None:
    """Refuse a text longer than the learned positions: its forward would fail, for all requests that share it."""
    config = model.config.get_text_config(decoder=of_decoder, encoder=not of_decoder)
    limit = num_positions(config)
    if limit is not None and not getattr(config, "rope_parameters", None) and num_tokens > limit:
        raise ValueError(
            f"The request may feed {num_tokens} tokens, but the model has {limit} positions: shorten the prompt or "
            "lower `max_new_tokens`."
        )
