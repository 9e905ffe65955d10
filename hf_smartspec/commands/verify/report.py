"""Results of `smartspec verify`, and their tables."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape
from transformers import PreTrainedTokenizerBase

from ..common.console import print_head, table
from ..common.exactness import Rounding
from ..common.outputs import json_safe
from .comparison import ScoreCheck, TokenCheck
from .frequencies import FALSE_ALARM, FrequencyCheck
from .reproduction import Reproduction

_SHOWN_DIFFERENCES = 10


@dataclass
class Report:
    """Results of all comparisons."""

    model: str
    assistant: str
    environment: dict[str, Any]
    prompt_source: str
    prompt_lengths: list[int]
    max_new_tokens: int
    rounding: Rounding | None  # None: not compared with plain generate
    tokens: list[TokenCheck] = field(default_factory=list)
    scores: list[ScoreCheck] = field(default_factory=list)
    frequencies: list[FrequencyCheck] = field(default_factory=list)
    reproductions: list[Reproduction] = field(default_factory=list)
    must_reproduce: bool = False  # whether all that they run is computed in code whose results are reproducible
    plain_tokens: dict[int, list[list[int]]] = field(default_factory=dict)  # greedy, by batch size
    warnings: list[str] = field(default_factory=list)

    @property
    def plain_rows_differing(self) -> dict[int, int]:
        """The number of rows in which plain decoding differs from itself at the first batch size, by batch size."""
        if not self.plain_tokens:
            return {}
        first, *others = self.plain_tokens
        pairs = {size: zip(self.plain_tokens[first], self.plain_tokens[size]) for size in others}
        # Rows of a batch are padded to the longest.
        return {size: sum(a[: len(b)] != b[: len(a)] for a, b in rows) for size, rows in pairs.items()}

    @property
    def checks(self) -> list[TokenCheck | Reproduction]:
        """All comparisons of tokens."""
        return [*self.tokens, *self.reproductions]

    @property
    def num_not_reproduced(self) -> int:
        """The number of rows that differ from those of their prompts alone."""
        return sum(check.num_differing for check in self.reproductions)

    @property
    def failures(self) -> list[str]:
        """Differences that rounding cannot explain: each is a bug."""
        found = []
        for check in self.tokens:
            num_real = sum(not item.is_tie for item in check.differences)
            if num_real:
                found.append(f"{check.decoding}, {check.drafts}, batch {check.batch_size}: {num_real} rows differ")
        if self.environment["dtype"] == "float32":
            # In half precision, a flipped expert or filter edge changes scores visibly: printed, but no failure.
            scores = [check for check in self.scores if not (check.is_close and check.is_filtered_alike)]
            found += [f"{check.decoding}, {check.drafts}: scores differ" for check in scores]
        if self.must_reproduce:
            others = [check for check in self.reproductions if check.num_differing]
            found += [f"{check.decoding}, {check.drafts}, {_place(check)}: not the tokens alone" for check in others]
        found += [f"{check.drafts}: frequencies deviate" for check in self.frequencies if not check.is_consistent]
        return found

    def as_dict(self) -> dict[str, Any]:
        result = asdict(self) | {"plain_rows_differing": self.plain_rows_differing}
        del result["plain_tokens"]
        for item, check in zip([*result["tokens"], *result["reproductions"]], self.checks):
            item["statistics"] = check.statistics.as_dict()
        for item, check in zip(result["tokens"], self.tokens):
            for line, difference in zip(item["differences"], check.differences):
                line["is_tie"] = difference.is_tie
        is_known = bool(self.tokens) or self.must_reproduce or not self.num_not_reproduced
        is_lossless = not self.failures if is_known else None
        return json_safe(result | {"failures": self.failures, "is_lossless": is_lossless})


def print_report(report: Report, console: Console, tokenizer: PreTrainedTokenizerBase | None) -> None:
    lengths, about = report.prompt_lengths, f"{report.model}, assistant {report.assistant}"
    prompts = f"{len(lengths)} prompts ({report.prompt_source}) of {min(lengths)} to {max(lengths)} tokens"
    new = f"up to {report.max_new_tokens} new tokens each"
    print_head(console, "verify", about, report.environment, f"{prompts}, {new}")
    if report.tokens:
        _print_tokens(report, console)
        _print_differences(report, console, _shower(tokenizer))
    if report.reproductions:
        _print_reproductions(report, console)
    if report.scores:
        _print_scores(report, console)
    if report.frequencies:
        _print_frequencies(report, console)
    for warning in report.warnings:
        console.print(f"[yellow]warning:[/yellow] {escape(warning)}")
    _print_verdict(report, console)


def _print_tokens(report: Report, console: Console) -> None:
    columns = ("decoding", "drafts", "batch", "rows", "tokens", "drafted", "accepted", "per step", "identical")
    lines = table("Tokens, against plain generate", *columns, num_text=2)
    for check in report.tokens:
        counts = check.statistics
        numbers = (check.batch_size, check.num_rows, check.num_tokens, counts.drafted_tokens, counts.accepted_tokens)
        mean = f"{counts.mean_accepted_length:.2f}"
        lines.add_row(check.decoding, check.drafts, *map(str, numbers), mean, _identical(check))
    console.print(lines)
    for size, num_rows in report.plain_rows_differing.items():
        first = report.tokens[0].batch_size
        console.print(
            f"For comparison: plain generate at batch {size} differs from itself at batch {first} in {num_rows} of "
            f"{len(report.prompt_lengths)} rows (greedy)."
        )
    console.print()


def _yes(is_good: bool) -> str:
    return "[green]yes[/green]" if is_good else "[red]NO[/red]"


def _identical(check: TokenCheck) -> str:
    if not check.differences:
        return _yes(True)
    num_real = sum(not item.is_tie for item in check.differences)
    if num_real:
        return f"[red]NO: {num_real} of {check.num_rows}[/red]"
    return f"[yellow]{len(check.differences)} tied[/yellow]"


def _print_differences(report: Report, console: Console, show: Callable[[int], str]) -> None:
    found = [(check, item) for check in report.tokens for item in check.differences]
    if not found:
        return
    # The clearest differences first.
    found.sort(key=lambda pair: (pair[1].is_tie, -math.inf if math.isnan(pair[1].plain_gap) else -pair[1].plain_gap))
    columns = ("decoding", "drafts", "batch", "row", "at", "plain", "ours", "plain gap", "our gap", "limit", "tie")
    lines = table("First difference of a row", *columns, num_text=2)
    for check, item in found[:_SHOWN_DIFFERENCES]:
        tokens = (escape(show(token)) for token in (item.plain_token, item.own_token))
        gaps = (f"{value:.2g}" for value in (item.plain_gap, item.own_gap, item.tolerance))
        place = (str(check.batch_size), str(item.row), str(item.position))
        lines.add_row(check.decoding, check.drafts, *place, *tokens, *gaps, "yes" if item.is_tie else "[red]NO[/red]")
    console.print(lines)
    if len(found) > _SHOWN_DIFFERENCES:
        console.print(f"({_SHOWN_DIFFERENCES} of {len(found)} shown, the clearest first; --json FILE has all.)")
    num_rows, num_tokens = (sum(getattr(check, name) for check in report.tokens) for name in ("num_rows", "num_tokens"))
    num_ties = sum(item.is_tie for _, item in found)
    console.print(
        f"{len(found)} of {num_rows} rows differ ({len(found) / max(num_rows, 1):.1%}; one difference in "
        f"{num_tokens // len(found)} tokens), {num_ties} of them at a tie: both gaps lie below the limit, which is "
        f"what rounding in {report.environment['dtype']} explains on this model (or a token at the very edge of top-k "
        "or top-p fell to the other side).\n"
    )


def _place(check: Reproduction) -> str:
    return f"batch {check.batch_size}" if check.batch_size else "engine"


def _print_reproductions(report: Report, console: Console) -> None:
    columns = ("decoding", "drafts", "where", "rows", "tokens", "identical")
    lines = table("Tokens, against this library's own without drafts, each prompt alone", *columns, num_text=3)
    for check in report.reproductions:
        differing = f"{check.num_differing} of {check.num_rows} differ"
        mark = "red" if report.must_reproduce else "yellow"
        same = _yes(True) if not check.num_differing else f"[{mark}]{differing}[/{mark}]"
        numbers = (str(check.num_rows), str(check.num_tokens))
        lines.add_row(check.decoding, check.drafts, _place(check), *numbers, same)
    console.print(lines)
    if not report.must_reproduce:
        console.print(
            "Parts of this model, or all of it, run in operators whose rounding depends on what they compute at once, "
            "so that rows may differ near ties."
        )
    console.print()


def _shower(tokenizer: PreTrainedTokenizerBase | None) -> Callable[[int], str]:
    def show(token: int) -> str:
        if token < 0:
            return "(ended)"
        text = f" {tokenizer.decode([token])!r}" if tokenizer is not None else ""
        return f"{token}{text}"[:10]

    return show


def _print_scores(report: Report, console: Console) -> None:
    columns = ("decoding", "drafts", "positions", "logits by", "scores by", "largest", "filtered apart", "close")
    lines = table("Returned logits and scores: how far they lie from plain generate's", *columns, num_text=2)
    for check in report.scores:
        sizes = (f"{check.logits:.1e}", f"{check.scores:.1e}", f"{check.largest:.1f}", str(check.num_edge))
        lines.add_row(check.decoding, check.drafts, str(check.num_positions), *sizes, _yes(check.is_close))
    console.print(lines)
    assert report.rounding is not None, "scores are compared with plain generate's"
    console.print(
        f"Rounding of this model: plain decoding and one forward over the same text differ by "
        f"{report.rounding.measured:.1e} of the largest logit.\n"
    )


def _print_frequencies(report: Report, console: Console) -> None:
    columns = ("drafts", "samples", "drafted", "accepted", "cells", "chi2", "p", "distance", "expected", "ok")
    lines = table("Frequencies of sampled token pairs, against exact probabilities", *columns)
    for check in report.frequencies:
        counts = (check.num_samples, check.drafted_tokens, check.accepted_tokens, check.num_cells)
        p_value = f"{check.p_value:.3f}" if check.p_value >= 1e-3 else f"{check.p_value:.0e}"
        figures = (f"{check.chi_square:.1f}", p_value, f"{check.distance:.3f}", f"{check.expected_distance:.3f}")
        lines.add_row(check.drafts, *map(str, counts), *figures, _yes(check.is_consistent))
    console.print(lines)
    console.print(
        f"The vocabulary is reduced to its likeliest tokens, so that every pair can be counted. Distance is the total "
        f"variation, beside what a perfect sampler has on average. Below p = {FALSE_ALARM:.0e} it fails: one false "
        f"alarm in {round(1 / FALSE_ALARM):,} checks.\n"
    )


def _print_verdict(report: Report, console: Console) -> None:
    if report.failures:
        shown, num_more = report.failures[:4], len(report.failures[4:])
        more = f"; and {num_more} more" if num_more else ""
        console.print("[bold red]NOT lossless:[/bold red] " + escape("; ".join(shown) + more))
        return
    num_ties = sum(len(check.differences) for check in report.tokens)
    dtype, num_rows = report.environment["dtype"], sum(check.num_rows for check in report.reproductions)
    alone = f"{report.num_not_reproduced} of {num_rows} rows differ from those of their prompts alone"
    if not any(check.statistics.accepted_tokens for check in report.checks):
        verdict = "[bold yellow]No speculation:[/bold yellow] the same tokens, but no draft was ever accepted."
    elif report.must_reproduce:  # and does
        others = f"; from plain generate's, {num_ties} rows differ at ties in {dtype}" if num_ties else ""
        verdict = (
            "[bold green]Lossless:[/bold green] the same tokens with and without speculation, in every batch and in an "
            f"engine{others}."
        )
    elif report.num_not_reproduced and not report.tokens:
        verdict = f"[bold yellow]Not reproducible:[/bold yellow] {alone}; `--against plain` tells ties from faults."
    elif num_ties or report.num_not_reproduced:
        more = f"; {alone}" if report.num_not_reproduced else ""
        verdict = (
            f"[bold yellow]Lossless up to rounding:[/bold yellow] all {num_ties} differences are ties in {dtype}{more}."
        )
    else:
        verdict = "[bold green]Lossless:[/bold green] the same tokens in every comparison."
    console.print(verdict)
