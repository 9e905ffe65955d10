"""A model that answers prompts, with its tokenizer and its assistant."""

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ....decoding.statistics import GenerationStatistics
from ....prepare.call import model_limits
from ....serving.engine import Engine
from ....serving.prompts import prompt_ids
from ..arguments import UsageError, usage_errors
from ..models import check_folder, demo_folder, dtype_to_load, load_model, load_tokenizer, use_machine, use_quantized
from ..names import parts_of
from .arguments import AUTO, Sampling

_NEW_SEEDS = 2**32


class TooLongError(ValueError):
    """Error of a prompt that leaves no room for new tokens."""


@dataclass(frozen=True)
class Speaker:
    """A loaded model that answers prompts."""

    name: str  # the folder or hub id; "embedded" for the embedded model
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    assistant: Any  # passed as `assistant=`; models by their folders or hub ids

    @property
    def num_positions(self) -> int | None:
        """Tokens of the longest text that the model takes; None where its config has no limit."""
        config = self.model.config.get_text_config(decoder=True)
        return model_limits(self.model).num_positions or getattr(config, "max_position_embeddings", None)

    def add_request(
        self,
        engine: Engine,
        ids: list[int],
        sampling: Sampling,
        max_new_tokens: int,
        seed: int,
        stop_strings: Sequence[str] = (),
        **options: Any,
    ) -> str:
        """
        Send a prompt to an engine, for as many new tokens as fit after it; return the name of the request.

        Raises:
            TooLongError: if no new token fits.
            ValueError: if the engine refuses the request.
        """
        room = max_new_tokens
        if self.num_positions is not None and not self.model.config.is_encoder_decoder:
            room = min(room, self.num_positions - len(ids))
        if room < 1:
            raise TooLongError(f"{len(ids)} tokens are too many: the model reads and writes {self.num_positions}")
        if stop_strings:
            options["stop_strings"] = list(stop_strings)
        return engine.add_request(ids, max_new_tokens=room, seed=seed, **options, **sampling.arguments())

    def new_engine(self, max_batch_size: int = 1) -> Engine:
        """
        Return a started engine for the model; raises `UsageError` if the assistant cannot draft for the model, or an
        engine cannot serve it.
        """
        with usage_errors():
            engine = Engine(self.model, self.assistant, max_batch_size=max_batch_size, tokenizer=self.tokenizer)
        return engine.start()


def load_speaker(args: argparse.Namespace) -> Speaker:
    """
    Load the model that the arguments of `add_model_arguments` name; raises `UsageError` for a model, tokenizer or
    template that cannot be loaded.
    """
    use_machine(args)
    assistant = assistant_of(args.assistant, args.draft)
    path = args.model or str(demo_folder("--model") / "models" / "target")
    dtype = args.dtype if args.dtype != AUTO or args.model else "float32"
    model = load_model(path, dtype_to_load(path, dtype, args.quantize), args.device, args.trust_remote_code)
    tokenizer = load_tokenizer(path, args.trust_remote_code)
    if tokenizer is None:
        raise UsageError(f"--model: {path!r} has no tokenizer")
    if template := getattr(args, "chat_template", None):
        with usage_errors(f"--chat-template: cannot read {template!r}"):
            tokenizer.chat_template = Path(template).read_text(encoding="utf-8")
    use_quantized(model, args.quantize, dtype)
    return Speaker(args.model or "embedded", model, tokenizer, assistant)


def assistant_of(name: str, draft: str | None = None) -> Any:
    """Return `--assistant` and `--draft` in the form of `assistant=`: a name, or a list of names."""
    if draft:
        check_folder(draft)
    items = [*parts_of(name), *([draft] if draft else [])]
    items = [item for item in items if item != "none"] or ["none"]
    return items if len(items) > 1 else items[0]


def shown(assistant: Any) -> str:
    return "+".join(assistant) if isinstance(assistant, list) else str(assistant)


def new_seed() -> int:
    """Return a random seed."""
    return random.SystemRandom().randrange(_NEW_SEEDS)


def summary(statistics: GenerationStatistics) -> str:
    """Return tokens, seconds, tokens per step and drafts as one line."""
    count, seconds = statistics.generated_tokens, statistics.seconds_total
    speed = f" in {seconds:.1f} s, {count / seconds:.0f} a second" if seconds > 0 else ""
    drafts = (
        f"{statistics.drafted_tokens} drafted, {statistics.accepted_tokens} accepted"
        if statistics.drafted_tokens
        else "nothing drafted"
    )
    return f"{count} tokens{speed}; {statistics.mean_accepted_length:.2f} a step; {drafts}"


Message = dict[str, Any]


@dataclass(frozen=True)
class Prompter:
    """Tokenizer of prompts, with or without the chat template."""

    tokenizer: PreTrainedTokenizerBase
    system: str | None = None  # system prompt, before the conversation
    is_raw: bool = False  # whether text is continued as it is, even where the tokenizer has a chat template

    def token_ids(self, prompt: str | Sequence[Mapping[str, Any]]) -> list[int]:
        """
        Return the token ids of a chat, or of a text, which is a user's turn where there is a chat template; raises
        `ValueError` for an empty prompt, one that is no UTF-8, a chat without a template, or an object that is neither
        text nor chat.
        """
        if isinstance(prompt, str):
            if not prompt.strip():
                raise ValueError("the prompt is empty")
            if self.is_raw or not self.tokenizer.chat_template:
                return self._ids(prompt)
            prompt = [{"role": "user", "content": prompt}]
        if not isinstance(prompt, Sequence):
            raise ValueError(f"a prompt is text or a chat, got {'nothing' if prompt is None else repr(prompt)}")
        messages = [_message(item) for item in prompt]
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()  # the answer that the model is to generate
        if not messages:
            raise ValueError("the chat is empty")
        if not self.tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template: name one with --chat-template")
        if self.system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        return self._ids(messages)

    def _ids(self, prompt: str | list[Message]) -> list[int]:
        try:  # as JSON, to reach all strings of a chat
            json.dumps(prompt, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError:  # other bytes of arguments, and of standard input in the C locale, are surrogates
            raise ValueError("the prompt is no UTF-8 text") from None
        ids: list[int] = prompt_ids(prompt, self.tokenizer)[0].tolist()
        return ids


def _message(item: Any) -> Message:
    """Return one turn without the keys that are None: tables fill in those of other rows."""
    if not isinstance(item, Mapping) or not isinstance(item.get("role"), str):
        raise ValueError('a chat is a list of {"role": ..., "content": ...}')
    return {key: value for key, value in item.items() if value is not None}
