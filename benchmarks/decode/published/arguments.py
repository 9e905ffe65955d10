"""Arguments of `python -m benchmarks published`."""

import argparse
from typing import NamedTuple

from hf_smartspec.commands.common.arguments import add_model_arguments, not_negative, positive, probability

from ...kit.arguments import add_options, add_resume_arguments

NONE, TABLE = "none", "table"
_FORMS = ("roofline", TABLE, "k=NUMBER", "nodes=NUMBER")


class Way(NamedTuple):
    """
    A drafter under a policy.

    Args:
        drafter (`str`): "none", a preset, a folder or a hub id, or several of these joined by plus signs.
        policy (`str`): "roofline", "table" (which `smartspec profile --table` has kept), "k=NUMBER" (chains of so many
            tokens), "nodes=NUMBER" (all that the source drafts, so many at most), or "" for the default.
    """

    drafter: str
    policy: str = ""

    @property
    def length(self) -> int | None:
        """The draft's length, where it is fixed."""
        return int(self.policy[2:]) if self.policy.startswith("k=") else None


def way(text: str) -> Way:
    """Return the way that the command line names, such as "sssd@roofline"."""
    found = Way(*text.rpartition("@")[::2]) if "@" in text else Way(text)
    kind, _, number = found.policy.partition("=")
    is_sized = kind in ("k", "nodes") and number.isdecimal() and int(number) > 0
    if not found.drafter or ("@" in text and found.policy not in ("roofline", TABLE) and not is_sized):
        raise argparse.ArgumentTypeError(
            f"must be DRAFTER or DRAFTER@POLICY with one of {', '.join(_FORMS)}, got {text!r}"
        )
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_resume_arguments(parser)
    parser.set_defaults(replay=False, limit=16)
    parser.add_argument(
        "--remember", type=not_negative, default=0, metavar="N",
        help="the target answers the first N requests of every FILE beforehand: suffix trees hold them from the "
        "beginning, and the drafter sssd has a datastore of them (default: 0)",
    )  # fmt: skip
    add_options(
        parser,
        ("--ways", way, ["sssd@roofline", "suffix_decoding", "auto"], "WAY",
         f"presets or folders, joined by plus signs, by themselves or as DRAFTER@POLICY with {', '.join(_FORMS)}; "
         f"{NONE} is always measured, and no way without a policy may be slower; the last way is the default, and may "
         "be slower than no other"),
        ("--batch-sizes", positive, [1, 4, 16], "B", "requests at once"),
        ("--repeats", positive, 1, "N", "runs of every way, in turns; figures are their medians"),
        ("--tolerance", probability, 0.03, "SHARE", "of a time that counts as noise in the claims"),
    )  # fmt: skip
