"""Operations and memory traffic of a forward by operator, from a config and a data sheet (SSSD, section 3.2.1)."""

import argparse
import math
import re
from typing import Any

import torch
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM

from ...goodput import LayerSizes, Operator, Roofline
from ..common.arguments import DTYPES, UsageError, usage_errors
from ..common.console import table
from ..common.models import check_folder

_ATTENTION = 3  # place of attention among the operators
_FIRST_LAYER = re.compile(r"\b(layers|h|blocks|block)\.0\.")


def analysed(args: argparse.Namespace) -> dict[str, Any]:
    """
    Return the analysis of --operators as plain numbers: sizes of a layer, table 1 for the first of --lengths, and the
    seconds of figure 3 for every context and length. Only the model's config is read.
    """
    sizes, num_layers, dtype = _sizes_of(args.model)
    per_number = getattr(torch, args.dtype if args.dtype in DTYPES else dtype).itemsize
    roofline = Roofline(*args.operators)
    free = roofline.free_tokens(sizes.hidden, per_number)
    rows = []
    for context in args.contexts:
        for length in args.lengths:
            operators = sizes.operators(args.batch_size, length, context)
            seconds = [num_layers * item.seconds(roofline, per_number) for item in operators]
            attention = seconds.pop(_ATTENTION)
            rows.append({"context": context, "length": length, "products": sum(seconds), "attention": attention})
    first = sizes.operators(args.batch_size, args.lengths[0], args.contexts[0])
    return {
        "model": args.model,
        "layers": num_layers,
        "layer": sizes._asdict(),
        "bytes_per_number": per_number,
        "roofline": roofline._asdict(),
        "batch_size": args.batch_size,
        "operators": [_line(item, roofline, per_number) for item in first],
        "forwards": rows,
        "free_tokens": free if math.isfinite(free) else None,
    }


def _line(operator: Operator, roofline: Roofline, per_number: float) -> dict[str, Any]:
    return operator._asdict() | {
        "intensity": operator.intensity,
        "seconds": operator.seconds(roofline, per_number),
    }


def _sizes_of(name: str) -> tuple[LayerSizes, int, str]:
    """Return the sizes of a layer, the number of layers, and the dtype; only dense layers are analysed."""
    check_folder(name)
    with usage_errors(f"cannot read the config of {name!r}", Exception):
        whole = AutoConfig.from_pretrained(name)
        config: Any = whole.get_text_config(decoder=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(whole)
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head = getattr(config, "head_dim", None) or config.hidden_size // heads
        mlp = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    weights = [item.numel() for key, item in model.named_parameters() if _FIRST_LAYER.search(key) and item.dim() == 2]
    attention = 2 * config.hidden_size * head * (heads + kv_heads)
    num_matrices = (sum(weights) - attention) / (config.hidden_size * mlp)
    if num_matrices not in (2, 3):
        raise UsageError(f"--operators: the layers of {name!r} are not those of a dense decoder with full attention")
    sizes = LayerSizes(config.hidden_size, heads, kv_heads, head, mlp, int(num_matrices))
    return sizes, config.num_hidden_layers, str(whole.dtype or torch.float32).removeprefix("torch.")


def print_operators(report: dict[str, Any], console: Console) -> None:
    """Print table 1 and figure 3."""
    roofline, first = report["roofline"], report["forwards"][0]
    title = (
        f"SSSD, table 1, with numbers: a layer of {report['model']}, batch size {report['batch_size']}, "
        f"{first['length']} tokens a row, context {first['context']}"
    )
    lines = table(title, "operator", "FLOPs", "read", "written", "FLOPs:IO", "approx.", "us")
    for item in report["operators"]:
        numbers = (f"{item[key]:.3g}" for key in ("flops", "read", "written"))
        ratios = (f"{item[key]:.1f}" for key in ("intensity", "limit"))
        lines.add_row(item["name"], *numbers, *ratios, f"{item['seconds'] * 1e6:.1f}")
    console.print(lines)
    lines = table(
        f"SSSD, figure 3: products and attention of {report['layers']} layers at {roofline['flops'] / 1e12:g} TFLOP/s "
        f"and {roofline['bandwidth'] / 1e9:g} GB/s",
        "context", "tokens a row", "products ms", "attention ms", "attention", "cost", num_text=0,
    )  # fmt: skip
    least: dict[int, float] = {}
    for row in report["forwards"]:
        total = row["products"] + row["attention"]
        cost = total / least.setdefault(row["context"], total)
        times = (f"{row[key] * 1e3:.2f}" for key in ("products", "attention"))
        share = f"{row['attention'] / total:.0%}"
        lines.add_row(str(row["context"]), str(row["length"]), *times, share, f"{cost:.2f}")
    console.print(lines)
    free, budget = report["free_tokens"], "Products with a weight of the hidden size wait for memory at any length"
    if free is not None:
        each = free / report["batch_size"]
        budget = f"Up to {free:.0f} tokens, {each:.0f} a row, products with a weight of the hidden size wait for it"
    console.print(
        f"Cost: against the first length. {budget} (section 3.2.1). Norms, embeddings, the head and attention's mask "
        "are left out.",
        highlight=False,
    )
