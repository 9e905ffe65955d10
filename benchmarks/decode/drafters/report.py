"""Results of `python -m benchmarks drafters`, as tables for the terminal or for a page."""

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

import numpy as np

from hf_smartspec.commands.common.names import JOINT
from hf_smartspec.commands.speed.loop import PLAIN
from hf_smartspec.decoding.statistics import GenerationStatistics

from ...kit.claims import Claim
from ...kit.tables import Lines, Row
from .arguments import BLOCKS, SPEED, STEPS, TREES
from .runs import CHAIN, NONE, TREE

ALL = "all"
LEAST_GAIN = 1.15  # tokens per step of a block's trees by those of its chains


def tables(report: dict[str, Any]) -> list[Lines]:
    """Return the tables of the parts that have been measured."""
    rows = flat(report)
    made = [_steps(rows, report), _trees(rows, report), *_blocks(rows), _equal_times(rows), _speed(rows, report)]
    return [lines for lines in made if lines.rows]


def flat(report: dict[str, Any]) -> list[Row]:
    """Return the rows of all parts as one list."""
    return [
        {"part": part} | row for part, cases in report["results"].items() for case in cases.values()
        for row in case["rows"]
    ]  # fmt: skip


def notes(report: dict[str, Any]) -> str:
    """Return what the tables are about, to be printed below them."""
    system, options = report["environment"], report["environment"]["conditions"]
    size = f"enlarged to {system['parameters'] / 1e6:.0f} M parameters" if system["is_enlarged"] else "as it is"
    own = [f"{name} {num / 1e6:.2f} M" for name, num in report["drafters"].items() if num and JOINT not in name]
    reference = report["reference"]
    return (
        f"{system['device']}, {system['threads']} threads, torch {system['torch']}, transformers "
        f"{system['transformers']}. Greedy, up to {options['max_new_tokens']} tokens of the target's own text, at most "
        f"{options['limit']} prompts of each kind.\n"
        f"Tokens per step: generated tokens by verification steps; accepted: of the drafted ones. ms: of drafting, per "
        f"step; by a step without drafts of the target as it is (/ step), and by one of plain generate of the larger "
        f"target (/ larger). x {reference}: tokens per step by those of this draft model in the same drafting "
        f"time, interpolated.\n"
        f"x plain: tokens per second by those of plain generate, prompts included, goodput deciding how much, with the "
        f"target {size} in {system['dtype']}. Drafters are not enlarged with it; their own parameters: "
        f"{', '.join(own) or 'none'}. Larger batches have rows of all kinds.\n"
        f"Blocks: batches of all kinds with the target as it is in {system['dtype']}; trees of at most "
        f"{max(options['nodes'])} nodes.\n"
        "Identical: every output is that of plain generate; tied: some differ where two tokens score alike up to "
        "rounding. Suffix trees know earlier answers of the same kind only."
    )


def _steps(rows: Sequence[Row], report: dict[str, Any]) -> Lines:
    found = [row for row in rows if row["part"] == STEPS and row["drafter"] != PLAIN]
    kinds, own, other = _of(found, "kind"), _step_seconds(found), _larger_step_seconds(rows)
    reference = report["reference"]
    known = sorted(_time_and_tokens(_total(group)) for (name, _), group in _groups(found).items() if name == reference)
    columns = ["drafter", "nodes", *kinds, ALL, "accepted", "ms", "/ step", "/ larger", f"x {reference}", "identical"]
    lines = []
    for (name, nodes), mine in _groups(found).items():
        if name == NONE:
            continue
        total = _total(mine)
        seconds, per_step = _time_and_tokens(total)
        lines.append(
            [
                name,
                str(nodes),
                *(_per_step(row for row in mine if row["kind"] == kind) for kind in kinds),
                f"{per_step:.2f}",
                f"{total.acceptance_rate:.0%}",
                f"{1e3 * seconds:.2f}",
                f"{seconds / own:.0%}" if own else "-",
                f"{seconds / other:.1%}" if other else "-",
                f"{per_step / at_equal_time(known, seconds):.2f}" if known else "-",
                _identical(mine),
            ]
        )
    title = "Tokens per step, one prompt at a time, float32, the target as it is"
    return Lines(title, columns if reference else [*columns[:-2], "x", columns[-1]], lines)


def at_equal_time(known: Sequence[tuple[float, float]], seconds: float) -> float:
    """
    Return the tokens per step of a drafter that takes this time to draft, interpolated between its measurements with
    fewer and with more nodes; beyond the longest time that was measured, it yields no more.

    Args:
        known (sequence of pairs): Seconds of drafting and tokens per step, in ascending order.
    """
    times, tokens = zip((0.0, 1.0), *known)  # without a draft, a step yields one
    return float(np.interp(seconds, times, tokens))


def _groups(rows: Iterable[Row]) -> dict[tuple[str, int], list[Row]]:
    """Return the rows by drafter and number of nodes, drafter by drafter."""
    groups: dict[tuple[str, int], list[Row]] = {}
    for name in _of(rows := list(rows), "drafter"):
        for row in rows:
            if row["drafter"] == name:
                groups.setdefault((name, row["nodes"]), []).append(row)
    return groups


def _time_and_tokens(total: GenerationStatistics) -> tuple[float, float]:
    """Return seconds of drafting, and tokens, per step of one prompt."""
    return total.seconds_draft / max(total.forwards, 1), total.mean_accepted_length


def _trees(rows: Sequence[Row], report: dict[str, Any]) -> Lines:
    found = [row for row in rows if row["part"] == TREES and row["drafter"] != PLAIN]
    kinds = _of(found, "kind")
    lines = []
    for name in _of(found, "drafter"):
        mine = [row for row in found if row["drafter"] == name]
        shares = [_per_step(row for row in mine if row["kind"] == kind) for kind in kinds]
        total = _total(mine)
        lines.append(
            [name, *shares, f"{total.mean_accepted_length:.2f}", f"{total.acceptance_rate:.0%}", _identical(mine)]
        )
    nodes = max(report["environment"]["conditions"]["nodes"])
    title = f"Medusa heads, tokens per step with {nodes} nodes, float32; fixed trees are the best ones of other prompts"
    return Lines(title, ["trees", *kinds, ALL, "accepted", "identical"], lines)


def _blocks(rows: Sequence[Row]) -> list[Lines]:
    """Return a table for each batch size."""
    found = _together(row for row in rows if row["part"] == BLOCKS)
    columns = ["drafts", "tokens per step", "accepted", "ms", "tokens/s", f"x {NONE}", "identical"]
    tables = []
    for size in _of(found, "batch_size"):
        mine = [row for row in found if row["batch_size"] == size and row["drafter"] != PLAIN]
        rates = {row["drafter"]: row["tokens_per_second"] for row in mine}
        lines = []
        for row in mine:
            total = _total([row])
            seconds, per_step = _time_and_tokens(total)
            lines.append(
                [
                    row["drafter"],
                    f"{per_step:.2f}",
                    f"{total.accepted_tokens / max(total.steps, 1):.2f}",
                    f"{1e3 * seconds:.2f}",
                    f"{rates[row['drafter']]:.1f}",
                    f"{rates[row['drafter']] / rates[NONE]:.2f}",
                    _identical([row]),
                ]
            )
        title = (
            f"Blocks, batch {size}; accepted: drafted tokens per step of a row; ms: of drafting, per step of the batch"
        )
        tables.append(Lines(title, columns, lines))
    return tables


def _together(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of part blocks, where those of one drafter and batch size are one for all kinds of text."""
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["drafter"], row["batch_size"]), []).append(row)
    found = []
    for group in groups.values():
        total = _total(group)
        seconds = [row["statistics"]["generated_tokens"] / row["tokens_per_second"] for row in group]
        own = {"statistics": total.as_dict(), "tokens_per_second": total.generated_tokens / sum(seconds)}
        found.append(group[0] | own | {name: sum(row[name] for row in group) for name in ("num_different", "num_tied")})
    return found


def _equal_times(rows: Sequence[Row]) -> Lines:
    """
    Return each block drafter's chains and trees beside those of other drafters whose drafting time is nearest.
    """
    found = _together(row for row in rows if row["part"] == BLOCKS and row.get("form") in (CHAIN, TREE))
    lines = []
    for row in (row for row in found if row["is_block"]):
        own, own_tokens = _time_and_tokens(_total([row]))
        others = [
            other for other in found
            if not other["is_block"] and (other["form"], other["batch_size"]) == (row["form"], row["batch_size"])
        ]  # fmt: skip
        for name in _of(others, "source"):
            measured = [(*_time_and_tokens(_total([other])), other) for other in others if other["source"] == name]
            seconds, tokens, other = min(measured, key=lambda item: abs(item[0] - own))
            times, per_step = (f"{1e3 * own:.2f}", f"{1e3 * seconds:.2f}"), (f"{own_tokens:.2f}", f"{tokens:.2f}")
            rates = (f"{item['tokens_per_second']:.1f}" for item in (row, other))
            names = f"{row['drafter']}; {other['drafter']}; batch {row['batch_size']}"
            lines.append([names, *times, *per_step, f"{own_tokens / tokens:.2f}", *rates])
    columns = ["block; other", "ms", "other", "tokens per step", "other", "ratio", "tokens/s", "other"]
    return Lines("Blocks at equal drafting time: beside each, the draft whose time is nearest", columns, lines)


def block_claims(rows: Sequence[Row]) -> list[Claim]:
    """Return for each block drafter and batch size whether its trees yield more tokens per step than its chains."""
    claims = []
    blocks = _together(row for row in rows if row.get("is_block"))
    by_form = {(row["source"], row["batch_size"], row["form"]): row for row in blocks}
    for name, size, form in by_form:
        if form == TREE:
            chain, tree = (_total([by_form[name, size, form]]) for form in (CHAIN, TREE))
            ratio = tree.mean_accepted_length / chain.mean_accepted_length
            detail = f"{tree.mean_accepted_length:.2f} / {chain.mean_accepted_length:.2f} = {ratio:.2f}"
            text = f"trees of {name} yield at least {LEAST_GAIN} x the tokens per step of its chains, batch {size}"
            claims.append(Claim(text, ratio >= LEAST_GAIN, detail))
    return claims


def _speed(rows: Sequence[Row], report: dict[str, Any]) -> Lines:
    found = [row for row in rows if row["part"] == SPEED and row["drafter"] != PLAIN]
    places = list(dict.fromkeys((row["batch_size"], row["kind"]) for row in found))
    lines = []
    for name in _of(found, "drafter"):
        mine = {(row["batch_size"], row["kind"]): row for row in found if row["drafter"] == name}
        ratios = [f"{mine[place]['speedup']:.2f}" if place in mine else "-" for place in places]
        lines.append([name, *ratios, _identical(list(mine.values()))])
    system = report["environment"]
    cost = f"cost-matched to {system['parameters'] / 1e6:.0f} M parameters" if system["is_enlarged"] else "as it is"
    columns = ["drafter", *(f"{kind}, {size}" for size, kind in places), "identical"]
    return Lines(f"x plain by kind and batch size, {system['dtype']}, the target {cost}", columns, lines)


def _of(rows: Iterable[Row], name: str) -> list[str]:
    return list(dict.fromkeys(row[name] for row in rows))


def _total(rows: Iterable[Row]) -> GenerationStatistics:
    names = GenerationStatistics.__dataclass_fields__
    parts = [GenerationStatistics(**{name: row["statistics"][name] for name in names}) for row in rows]
    return sum(parts, GenerationStatistics())


def _per_step(rows: Iterable[Row]) -> str:
    total = _total(rows)
    return f"{total.mean_accepted_length:.2f}" if total.steps else "-"


def _step_seconds(rows: Sequence[Row]) -> float:
    """Return the seconds of a step without drafts, prefill excluded."""
    total = _total(row for row in rows if row["drafter"] == NONE)
    return (total.seconds_total - total.seconds_prefill) / max(total.steps, 1)


def _larger_step_seconds(rows: Sequence[Row]) -> float:
    """
    Return the seconds per token of plain decoding at batch 1 by the enlarged target; 0 where speed was not measured.
    """
    plain = [row for row in rows if (row["part"], row["drafter"], row["batch_size"]) == (SPEED, PLAIN, 1)]
    return median(row["decode_seconds_per_token"] for row in plain) if plain else 0.0


def _identical(rows: Iterable[Row]) -> str:
    different, tied = (sum(row[name] for row in rows) for name in ("num_different", "num_tied"))
    return f"NO: {different}" if different else f"{tied} tied" if tied else "yes"
