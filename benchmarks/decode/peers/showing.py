"""What was found, on the terminal."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from hf_smartspec.commands.common.console import fold, table

from .measuring import Rows


def print_rows(console: Console, kind: str, rows: Rows, report: dict[str, Any]) -> None:
    lines = table(kind, "engine", "decoding", "text", "batch", "tokens/s", "x plain", "as float32", num_text=3)
    fold(lines, 1)
    before: tuple[str, int] | None = None
    for row in sorted(rows.values(), key=lambda row: row["batch_size"]):
        if before not in (None, (row["text"], row["batch_size"])):
            lines.add_section()
        before = row["text"], row["batch_size"]
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        same = f"{row['num_same_tokens'] / row['num_tokens']:.0%}, {row['num_same_rows']} of {row['num_rows']}"
        speed = f"{row['tokens_per_second']:.1f}"
        lines.add_row(row["peer"], row["way"], row["text"], str(row["batch_size"]), speed, ratio, same)
    if rows:
        console.print(lines)


def print_end(console: Console, report: dict[str, Any], path: Path) -> None:
    for name, reason in report["failures"].items():
        console.print(f"[red]not measured[/red]: {escape(name)}: {escape(reason)}", highlight=False)
    system = report["environment"]
    name = system["model"] or "the embedded target"
    size = f"{name} at {system['parameters'] / 1e6:.0f} M parameters" if system["parameters"] else f"{name} as it is"
    about = [f"{name}: {text}" for name, text in report["peers"].items()]
    console.print(
        f"{system['device']}, {system['threads']} threads each, {size}, {system['max_new_tokens']} new tokens.",
        "x plain: to plain generate in the same precision, turn by turn. as float32: tokens up to the first that is "
        "not that of plain generate in float32, and rows without any.",
        *about,
        *(["A trial run: the figures mean nothing."] if report["is_smoke"] else []),
        f"everything is in {path}",
        sep="\n",
        style="dim",
        markup=False,
        highlight=False,
    )
