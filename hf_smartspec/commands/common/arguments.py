"""Arguments that several commands have, and the types of their values."""

import argparse
import math
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DTYPES = ("float32", "bfloat16", "float16")
AUTO = "auto"  # in place of a dtype: that of the model's files
QUANTIZATIONS = ("int8", "int4")  # kinds that `quantize` takes
PARAMETERS = 200e6  # of the demo target, enlarged


class UsageError(Exception):
    """Error of a command's arguments or files; its message is printed as one line, and the exit status is 2."""


@contextmanager
def usage_errors(
    prefix: str = "", *kinds: type[Exception], reason: Callable[[Exception], object] | None = None
) -> Iterator[None]:
    """
    Raise `UsageError` in place of these errors.

    Args:
        prefix (`str`): Beginning of the message, such as the option's name.
        kinds (exceptions): By default `OSError`, `TypeError` and `ValueError`.
        reason (`Callable`, *optional*): Returns the rest of the message; by default, the error's own.
    """
    kinds = kinds or (OSError, TypeError, ValueError)
    try:
        yield
    except kinds as error:
        rest = _reason(error, prefix) if reason is None else str(reason(error))
        raise UsageError(": ".join(filter(None, [prefix, rest]))) from error


def _reason(error: Exception, prefix: str) -> str:
    """Return an error's message, without its number and path where `prefix` names that path."""
    if isinstance(error, OSError) and error.strerror and repr(str(error.filename)) in prefix:
        return error.strerror
    return str(error)


def checked(parse: Callable[[str], Any], is_valid: Callable[[Any], bool], wanted: str) -> Callable[[str], Any]:
    """Return the type of an argument, for argparse, whose value must be `wanted`."""

    def value_of(text: str) -> Any:
        value = parse(text)
        if not is_valid(value):
            raise argparse.ArgumentTypeError(f"must be {wanted}, got {text}")
        return value

    return value_of


def _number(kind: Callable[[str], Any], name: str) -> Callable[[str], Any]:
    def value_of(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no {name}") from None

    return value_of


integer, number = _number(int, "integer"), _number(float, "number")
positive = checked(integer, lambda value: value >= 1, "at least 1")
not_negative = checked(integer, lambda value: value >= 0, "at least 0")
positive_number = checked(number, lambda value: 0 < value < math.inf, "positive")
not_negative_number = checked(number, lambda value: 0 <= value < math.inf, "at least 0")
probability = checked(number, lambda value: 0 < value <= 1, "above 0 and at most 1")
port = checked(not_negative, lambda value: value <= 65535, "at most 65535")


def positive_list(text: str) -> list[int]:
    return list(map(positive, text.split(",")))


def not_empty(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def host(text: str) -> str:
    """Return an address from the command line; an empty one is refused, since sockets take it for all addresses."""
    if not text:
        raise argparse.ArgumentTypeError("must name an address; 0.0.0.0 is all of this machine's")
    return text


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of benches of the engine: target, draft, prompts and outputs."""
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="FILE",
        help=".jsonl or .jsonl.gz with prompts, where they are replayed with responses too; one is one data set "
        "(default: the demo's)",
    )  # fmt: skip
    add_target_arguments(parser)
    parser.add_argument("--draft", metavar="MODEL", help="draft model (default: the demo's for the demo's target)")
    parser.add_argument(
        "--limit", type=positive, default=64, metavar="N", help="different prompts per FILE (default: %(default)s)"
    )
    parser.add_argument(
        "--max-prompt", type=positive, default=256, metavar="N", help="tokens of a prompt, its end (default: 256)"
    )
    parser.add_argument("--max-new-tokens", type=positive, default=48, metavar="N", help="default: %(default)s")
    parser.add_argument("--max-batch-size", type=positive, default=16, metavar="N", help="default: 16")
    parser.add_argument(
        "--seed", type=not_negative, default=0, metavar="N", help="of arrivals and of the order of prompts (default: 0)"
    )
    add_output_arguments(parser)


def add_text_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --replay and --remember: the responses of the target, and those of earlier requests."""
    parser.add_argument(
        "--replay", action="store_true",
        help="the target runs at its cost, but picks the recorded responses, so that drafts meet real text",
    )  # fmt: skip
    parser.add_argument(
        "--remember", type=not_negative, default=0, metavar="N",
        help="the first N requests of every FILE are not sent: suffix trees hold them and their responses from the "
        "beginning, as those of a service that has run for a while (default: 0)",
    )  # fmt: skip


def add_recording_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `load_recordings`."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help=".jsonl or .jsonl.gz; one is one data set")
    parser.add_argument("--prompt-field", default="prompt", metavar="NAME", help="default: prompt")
    parser.add_argument("--response-field", default="response", metavar="NAME", help="default: response")
    parser.add_argument(
        "--turns", choices=("all", "last", "none"), default="all",
        help="of conversations, replay all assistant turns (default), the last, or none but the two fields",
    )  # fmt: skip
    parser.add_argument(
        "--max-prompt", type=positive, default=2048, metavar="N", help="tokens of a prompt, its end (default: 2048)"
    )
    parser.add_argument("--tokenizer", metavar="NAME", help="folder or hub id (default: the demo's)")


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `load_target`."""
    parser.add_argument("--model", metavar="MODEL", help="target: folder or hub id (default: the demo's)")
    parser.add_argument(
        "--parameters", type=number, metavar="N",
        help="enlarge the target to about N parameters without a change of its output, so that real text meets real "
        f"cost; 0 leaves it as it is (default: {PARAMETERS:.0e} for the demo's target, 0 for others)",
    )  # fmt: skip
    add_dtype_argument(parser)
    parser.add_argument("--quantize", choices=QUANTIZATIONS, help="run the target's linear maps in it, on the CPU")
    add_machine_arguments(parser)


def add_dtype_argument(parser: argparse._ActionsContainer, note: str = "") -> None:
    parser.add_argument(
        "--dtype", choices=(AUTO, *DTYPES), default=AUTO,
        help=f"auto: that of the model's files{note} (default: %(default)s)",
    )  # fmt: skip


def add_machine_arguments(parser: argparse._ActionsContainer) -> None:
    """Add the arguments of `use_machine`."""
    add_device_argument(parser)
    parser.add_argument("--threads", type=positive, metavar="N", help="CPU threads (default: torch's choice)")


def add_device_argument(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--device", metavar="DEVICE", help="default: a GPU if there is one, else the CPU")


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    add_json_argument(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw them, for example into a .png file")


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")


def command_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments with paths as text, for JSON."""
    return {
        key: str(value) if isinstance(value, Path) else [str(item) for item in value] if key == "files" else value
        for key, value in vars(args).items()
    }


def listen_at(host: str, port: int) -> socket.socket:
    """
    Return a listening socket, to be made before anything is loaded. Port 0 takes a free one. Raises `UsageError` if the
    address is in use, or is no address.
    """
    from ...serving.server.running import listen  # needs a server's packages

    try:
        return listen(host, port)
    except OSError as error:
        raise UsageError(f"cannot listen at {host}, port {port}: {error.strerror or error}") from error
