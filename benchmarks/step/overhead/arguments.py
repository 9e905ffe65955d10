"""Arguments of `python -m benchmarks overhead`."""

import argparse
from pathlib import Path

from hf_smartspec.commands.common.arguments import DTYPES, add_device_argument, number, positive

from ...kit.arguments import add_options, add_session_arguments

PARTS = ("host", "forward", "step", "none")
QUANTIZED, QUALITY = "quantized", "quality"  # take minutes, and are measured only on request


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="default: bfloat16")
    add_device_argument(parser)
    parser.add_argument(
        "--parts", nargs="+", default=PARTS, choices=(*PARTS, QUANTIZED, QUALITY),
        help="host: the host time of steps without a forward; forward: packed against plain forwards; step: the share "
        "of steps outside the forwards; none: decoding without speculation (default: all these); quantized: the "
        "embedded target, cost-matched, in --dtype, int8 and int4; quality: perplexity in each of them",
    )  # fmt: skip
    add_options(
        parser,
        ("--model", str, None, "MODEL", "folder, hub id or .gguf file (default: SmolLM2, if in the cache, else random "
         "weights; quantized: the demo's target)"),
        ("--threads", positive, 2, "N", "CPU threads"),
        ("--batch-sizes", positive, [1, 4, 8], "B", "rows"),
        ("--widths", positive, [1, 4], "N", "tokens per row"),
        ("--repeats", positive, None, "N", "measurements per setting (default: 7; quantized: 3)"),
        ("--layers", positive, None, "N", "random weights of N layers; 15 make 205 M parameters"),
        ("--parameters", number, [205e6, 1e9], "N", "of the targets that are quantized"),
        ("--prompts", Path, None, "FILE", "for these, and for quality (default: the demo's)"),
        ("--num-prompts", positive, 2, "N", "for these"),
        ("--max-new-tokens", positive, 32, "N", "for each prompt of these"),
        ("--host-steps", positive, 100, "N", "measured steps without a forward"),
    )  # fmt: skip
    add_session_arguments(parser)
