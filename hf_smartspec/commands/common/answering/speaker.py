"""A model that answers prompts, with its tokenizer and its assistant."""

import argparse
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ....prepare.call import model_limits
from ....serving.engine import Engine
from ..arguments import UsageError
from ..demo import demo_folder
from ..models import check_folder, load_model, load_tokenizer, use_machine, use_quantized
from ..names import parts_of
from .arguments import AUTO

_NEW_SEEDS = 2**32


@dataclass(frozen=True)
class Speaker:
    """
    A loaded model that answers prompts.

    Args:
        name (`str`): The folder or hub id; "embedded" for the embedded model.
        assistant: Passed as `assistant=`; models by their folders or hub ids.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    assistant: Any

    @property
    def num_positions(self) -> int | None:
        """Tokens of the longest text that the model takes; None where its config has no limit."""
        config = self.model.config.get_text_config(decoder=True)
        return model_limits(self.model).num_positions or getattr(config, "max_position_embeddings", None)

    def room(self, num_tokens: int, max_new_tokens: int) -> int:
        """Return how many new tokens fit after a prompt, `max_new_tokens` at most; 0 or less if none do."""
        if self.num_positions is None or self.model.config.is_encoder_decoder:
            return max_new_tokens
        return min(max_new_tokens, self.num_positions - num_tokens)

    def new_engine(self, max_batch_size: int = 1) -> Engine:
        """
        Return a started engine for the model.

        Raises:
            UsageError: if the assistant cannot draft for the model, or an engine cannot serve it.
        """
        try:
            engine = Engine(self.model, self.assistant, max_batch_size=max_batch_size, tokenizer=self.tokenizer)
        except (TypeError, ValueError, OSError) as error:
            raise UsageError(str(error)) from error
        return engine.start()


def load_speaker(args: argparse.Namespace) -> Speaker:
    """
    Load the model that the arguments of `add_model_arguments` name.

    Raises:
        UsageError: for a model, tokenizer or template that cannot be loaded.
    """
    use_machine(args)
    assistant = assistant_of(args.assistant, args.draft)
    path = args.model or str(demo_folder("--model") / "models" / "target")
    dtype = args.dtype if args.dtype != AUTO or args.model else "float32"
    model = load_model(path, dtype, args.device, args.trust_remote_code)
    tokenizer = load_tokenizer(path, args.trust_remote_code)
    if tokenizer is None:
        raise UsageError(f"--model: {path!r} has no tokenizer")
    if template := getattr(args, "chat_template", None):
        tokenizer.chat_template = _read(template)
    use_quantized(model, args.quantize)
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


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--chat-template: cannot read {path!r}: {error}") from error
