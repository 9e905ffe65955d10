"""Arguments of `python -m benchmarks batch`."""

import argparse

from hf_smartspec.commands.common.arguments import add_model_arguments, not_negative, positive
from hf_smartspec.commands.common.names import SOURCES, source_name

from ...kit.arguments import add_options, add_resume_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_resume_arguments(parser)
    parser.set_defaults(replay=False, remember=0, limit=16, max_new_tokens=24)
    add_options(
        parser,
        ("--batch-sizes", positive, [1, 2, 4, 8], "B", "rows"),
        ("--lengths", not_negative, [0, 1, 2, 4, 8], "K", "draft tokens"),
        ("--sources", source_name, ["draft"], "SOURCE", f"{', '.join(SOURCES)}, or folders of learned drafters"),
        ("--repeats", positive, 1, "N", "runs of every cell"),
    )
