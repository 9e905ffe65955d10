"""Arguments that several commands have, and the types of their values."""

import argparse
from pathlib import Path
from typing import Any

TURNS = ("all", "last", "none")
DTYPES = ("float32", "bfloat16", "float16")
AUTO = "auto"  # in place of a dtype: that of the model's files
QUANTIZATIONS = ("int8",)  # kinds that `quantize` takes
PARAMETERS = 200e6  # of the demo target, enlarged


class UsageError(Exception):
    """Error of a command's arguments or files; its message is printed as one line, and the exit status is 2."""


def positive(text: str) -> int:
    return _integer(text, 1)


def not_negative(text: str) -> int:
    return _integer(text, 0)


def not_empty(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def positive_list(text: str) -> list[int]:
    return [_integer(part, 1) for part in text.split(",")]


def _integer(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no integer") from None
    if value < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
    return value


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None


def positive_number(text: str) -> float:
    value = number(text)
    if not (0 < value < float("inf")):
        raise argparse.ArgumentTypeError(f"must be positive, got {text}")
    return value


def not_negative_number(text: str) -> float:
    value = number(text)
    if not (0 <= value < float("inf")):
        raise argparse.ArgumentTypeError(f"must not be negative, got {text}")
    return value


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
