"""Arguments of commands that answer prompts."""

import argparse
from typing import Any, NamedTuple

from ..arguments import (
    AUTO,
    QUANTIZATIONS,
    UsageError,
    add_dtype_argument,
    add_machine_arguments,
    not_negative,
    not_negative_number,
    positive,
    positive_number,
    probability,
)


class Sampling(NamedTuple):
    """Sampling options; those that are None are taken from the model's generation config."""

    temperature: float | None = None  # 0 takes the most probable token
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def at(self, temperature: float | None) -> "Sampling":
        """Return the options at another temperature; at 0, filters have no effect and are dropped."""
        if temperature == 0:
            return Sampling(0.0, repetition_penalty=self.repetition_penalty)
        return self._replace(temperature=temperature)

    def arguments(self) -> dict[str, Any]:
        """Return keyword arguments of `generate`."""
        given = {name: value for name, value in self._asdict().items() if value is not None}
        if given.get("temperature") == 0:
            return {"do_sample": False, **{name: given[name] for name in given.keys() & {"repetition_penalty"}}}
        if given.keys() - {"repetition_penalty"}:
            given["do_sample"] = True
        return given


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that choose the model and what drafts for it."""
    group = parser.add_argument_group("model")
    group.add_argument("--model", metavar="MODEL", help="folder or hub id (default: the embedded one)")
    group.add_argument(
        "--assistant", default=AUTO, metavar="NAME",
        help="what drafts: auto, suffix, suffix_decoding, token_recycling, prompt_lookup, pld, mtp, none, "
        "early_exit:N, datastore:FILE, sssd:FILE, tuned:FILE, the folder or hub id of a draft model or of heads, or "
        "some of these joined by plus signs (default: auto)",
    )  # fmt: skip
    group.add_argument("--draft", metavar="MODEL", help="a draft model to add to --assistant, as in NAME+MODEL")
    add_dtype_argument(group, ", float32 for the embedded one")
    group.add_argument("--quantize", choices=QUANTIZATIONS, help="run the model's linear maps in it, on the CPU")
    add_machine_arguments(group)
    group.add_argument("--trust-remote-code", action="store_true", help="run Python code that lies beside the model")


def add_sampling_arguments(parser: argparse.ArgumentParser, max_new_tokens: int) -> argparse._ArgumentGroup:
    """Add the arguments for the length of answers and for sampling; return their group."""
    group = parser.add_argument_group("sampling", "default: the model's generation_config.json")
    group.add_argument(
        "--max-new-tokens", type=positive, default=max_new_tokens, metavar="N",
        help="of an answer (default: %(default)s)",
    )  # fmt: skip
    group.add_argument("--temperature", type=not_negative_number, metavar="X", help="0: always the most probable token")
    group.add_argument("--top-k", type=positive, metavar="N", help="of the N most probable tokens")
    group.add_argument("--top-p", type=probability, metavar="P", help="of the likeliest tokens that make up P together")
    group.add_argument(
        "--min-p", type=probability, metavar="P", help="of tokens at least P times as likely as the first"
    )
    group.add_argument("--repetition-penalty", type=positive_number, metavar="X", help="above 1: fewer repetitions")
    group.add_argument("--seed", type=not_negative, metavar="N", help="the same text again (default: a new one)")
    return group


def add_text_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the arguments for system prompt and chat template; return their group."""
    group = parser.add_argument_group("text")
    group.add_argument("--system", metavar="TEXT", help="system prompt, before the conversation")
    group.add_argument("--chat-template", metavar="FILE", help="a Jinja file, in place of the tokenizer's own")
    return group


def sampling_of(args: argparse.Namespace) -> Sampling:
    """Return the sampling options of a command line; raises `UsageError` for options that exclude one another."""
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.min_p, args.repetition_penalty)
    if sampling.temperature == 0:
        for name in ("top_k", "top_p", "min_p"):
            if getattr(sampling, name) is not None:
                option = name.replace("_", "-")
                raise UsageError(f"--temperature 0 always takes the most probable token: leave --{option} out")
    return sampling
