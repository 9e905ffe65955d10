"""Speculative decoding with hf-smartspec, beside plain `generate` and transformers' own assisted decoding.

    python demos/demo.py                                # SmolLM2-135M-Instruct, which `make setup` fetches
    python demos/demo.py --parameters 200e6             # the embedded models, at the cost of a larger one
    python demos/demo.py --target Qwen/Qwen2.5-1.5B-Instruct --draft Qwen/Qwen2.5-0.5B-Instruct

Streams one answer, then measures every way of decoding in each dtype, at batch 1 and at batch 8, and compares the
tokens. Exit status 1 if ours differ from plain generate's in float32.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

import hf_smartspec
from compare import NO_DRAFTS, PLAIN, Result, all_methods, compare
from hf_smartspec.commands.common.arguments import DTYPES, PARAMETERS, UsageError, usage_errors
from hf_smartspec.commands.common.console import environment, make_console, table
from hf_smartspec.commands.common.cost_matched import enlarge
from hf_smartspec.commands.common.exactness import find_differences
from hf_smartspec.commands.common.models import (
    check_device,
    check_folder,
    encode,
    left_padded,
    load_draft,
    load_model,
    load_tokenizer,
    read_prompts,
)
from hf_smartspec.commands.common.outputs import check_output
from hf_smartspec.commands.common.real_model import NAME, real_model
from hf_smartspec.commands.common.runs import Decoding, decode_plainly, decode_speculatively

HERE = Path(__file__).resolve().parent
HEADS = "smollm2-eagle3"  # of the real model
EXACT = "float32"  # ours have plain generate's tokens; in other dtypes, those of ours without drafts
_MAX_SECONDS = 30.0  # per dtype and batch size: as many repetitions as end within, and at least one
_MAX_SPREAD = 1.3
_MINUTES = 4
_SHOWN_TOKENS = 96  # of the streamed answer, at most


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--target", metavar="MODEL", help=f"folder or hub id (default: {NAME}, where it was fetched)")
    parser.add_argument("--draft", metavar="MODEL", help="draft model of the same tokenizer: folder or hub id")
    parser.add_argument(
        "--parameters",
        type=float,
        metavar="N",
        help="enlarge the target to the cost of so many parameters, with unchanged outputs; without --target, the "
        f"embedded one (its default: {PARAMETERS:g}; 0: as it is)",
    )
    parser.add_argument("--prompts", type=Path, metavar="FILE", help=".jsonl or .txt")
    parser.add_argument("--num-prompts", type=int, default=8, metavar="N", help="default: 8, which is the large batch")
    parser.add_argument("--max-new-tokens", type=int, default=48, metavar="N", help="default: 48")
    parser.add_argument(
        "--repetitions", type=int, default=3, metavar="N", help="at most; medians are shown (default: 3)"
    )
    parser.add_argument(
        "--dtype", nargs="+", choices=DTYPES, default=["bfloat16", EXACT], help="default: bfloat16 and float32"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="CPU threads (default: 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    args = parser.parse_args(argv)
    for name in ("num_prompts", "max_new_tokens", "repetitions", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    return args


def choose_models(args: argparse.Namespace) -> None:
    """
    Fill in what the user leaves open: the real model where it was fetched, else the embedded ones; these serve too
    where a draft model or a size is named, but no target. The default real model has heads that were trained for it.
    """
    args.name, args.heads = "the embedded models", None
    if args.target is args.draft is args.parameters is None:
        args.target = real_model()
        args.heads = args.target and str(HERE / "models" / HEADS)
        args.name += f", since {NAME} is not here (`make setup` fetches it)"
    is_embedded = args.target is None
    if is_embedded:
        args.target, args.draft = str(HERE / "models" / "target"), args.draft or str(HERE / "models" / "draft")
        args.parameters = PARAMETERS if args.parameters is None else args.parameters
    else:
        args.name = Path(args.target).name
    args.prompts = args.prompts or HERE / ("prompts.jsonl" if is_embedded else "real_prompts.jsonl")


def pick_rows(rows: list[dict[str, Any]], num_rows: int) -> list[dict[str, Any]]:
    """Return one row of every category in turn, so that any number of them is mixed."""
    by_category: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_category.setdefault(row.get("category", "text"), []).append(row)
    turns = zip_longest(*by_category.values())
    return [row for turn in turns for row in turn if row is not None][:num_rows]


def load(args: argparse.Namespace, dtype: str) -> tuple[PreTrainedModel, PreTrainedModel | None]:
    model = load_model(args.target, dtype, args.device)
    if args.parameters:
        with usage_errors("", ValueError):
            model = enlarge(model, args.parameters)
    return model, load_draft(args.draft, model, dtype) if args.draft else None


def stream_answer(
    console: Console,
    model: PreTrainedModel,
    assistant: Any,
    tokenizer: PreTrainedTokenizerBase,
    row: dict[str, Any],
    prompt: list[int],
) -> None:
    """Print one answer while it is written, a few tokens at a time."""
    console.rule("[bold]One answer, streamed: generate(..., assistant=..., streamer=...)[/bold]", align="left")
    console.print(escape(row["prompt"].strip()), style="dim", highlight=False)
    print(flush=True)
    inputs = left_padded([prompt], tokenizer.pad_token_id or 0, model.device)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    with hf_smartspec.enabled(model):
        model.generate(**inputs, assistant=assistant, streamer=streamer, do_sample=False, max_new_tokens=_SHOWN_TOKENS)
        counts = model.smartspec_statistics.last
    console.print(
        f"\n[dim]{counts.generated_tokens} tokens in {counts.steps} steps, {counts.accepted_tokens} of "
        f"{counts.drafted_tokens} drafted tokens accepted[/dim]\n",
        highlight=False,
    )


def check_sampling(model: PreTrainedModel, prompts: list[list[int]], max_new_tokens: int, assistant: Any) -> int:
    """Return the number of rows of one sampled batch that differ from the reference with the same noise."""
    inputs, decoding = left_padded(prompts, model.generation_config.pad_token_id or 0, model.device), Decoding(seed=1)
    if model.dtype == torch.float32:
        reference = decode_plainly(model, inputs, decoding, max_new_tokens)
    else:
        reference = decode_speculatively(model, inputs, decoding, max_new_tokens, "none")
    own = decode_speculatively(model, inputs, decoding, max_new_tokens, assistant)
    return len(find_differences(reference.tokens, own.tokens))


def reference_of(result: Result, results: Sequence[Result]) -> Result:
    """Return the result at batch 1 whose tokens `result` should have."""
    name = NO_DRAFTS if result.is_ours and result.dtype != EXACT else PLAIN
    return next(item for item in results if (item.dtype, item.name) == (result.dtype, name))


def plain_of(result: Result, results: Sequence[Result]) -> Result:
    """Return plain `generate` in the dtype and batch size of `result`."""
    key = (result.dtype, result.batch_size, PLAIN)
    return next(item for item in results if (item.dtype, item.batch_size, item.name) == key)


def print_speeds(console: Console, results: Sequence[Result]) -> None:
    kinds = list(dict.fromkeys((item.dtype, item.batch_size) for item in results))
    columns = [f"{dtype}\nbatch {size}" for dtype, size in kinds]
    lines = table("Tokens per second (and x plain generate)", "", *columns, "same\ntokens", "tokens\nper step")
    for name in dict.fromkeys(item.name for item in results):
        own = [item for item in results if item.name == name]
        measured = [item for item in own if item.refusal is None]
        num_rows = sum(len(item.rows[0]) for item in measured)
        num_same = num_rows - sum(item.num_different(reference_of(item, results)) for item in measured)
        same = "yes" if num_same == num_rows else f"[red]{num_same} of {num_rows}[/red]"
        per_step = own[0].tokens_per_step
        cells = [_speed(item, results) for item in own]
        lines.add_row(name, *cells, same, "-" if per_step is None else f"{per_step:.2f}")
    console.print(lines)


def _speed(item: Result, results: Sequence[Result]) -> str:
    if item.refusal is not None:
        return "refused"
    if item.name == PLAIN:
        return f"{item.tokens_per_second:.0f} (1.00)"
    ratio = item.speedup(plain_of(item, results))
    text = f"{item.tokens_per_second:.0f} ({ratio:.2f})"
    return f"[red]{text}[/red]" if ratio < 1 else text


def print_categories(console: Console, results: Sequence[Result], categories: Sequence[str]) -> None:
    """Print how the speed depends on the kind of text, at batch 1 in the first dtype."""
    names = list(dict.fromkeys(categories))
    own = [item for item in results if (item.dtype, item.batch_size) == (results[0].dtype, 1) and not item.refusal]
    lines = table(f"By kind of text ({results[0].dtype}, batch 1), x plain generate", "", *names)
    for item in own[1:]:
        places = [[place for place, category in enumerate(categories) if category == name] for name in names]
        ratios = [item.speedup(own[0], chosen) for chosen in places]
        cells = [f"[red]{ratio:.2f}[/red]" if ratio < 1 else f"{ratio:.2f}" for ratio in ratios]
        lines.add_row(item.name, *cells)
    console.print(lines)


def print_notes(
    console: Console,
    args: argparse.Namespace,
    model: PreTrainedModel,
    draft: PreTrainedModel | None,
    results: Sequence[Result],
) -> None:
    system = environment(model.device, model.dtype)
    measured = [item for item in results if item.refusal is None]
    spread = max(item.spread for item in measured)
    if spread > _MAX_SPREAD:
        console.print(
            f"[yellow]Repetitions of one and the same call differ by {spread:.1f} x: other programs are running, "
            "and the speeds above mean little. Measure again on a quiet machine, or with --threads 1.[/yellow]\n",
            highlight=False,
        )
    turns = {len(item.seconds) for item in measured}
    numbers = " to ".join(map(str, dict.fromkeys((min(turns), max(turns)))))
    repetitions = "One repetition" if max(turns) == 1 else f"Medians of {numbers} repetitions"
    refused = next((item.refusal for item in results if item.refusal), None)
    size = len(results[-1].rows[0])
    console.print(
        f"Batch 1 decodes the {size} prompts one after another, batch {size} all at once; reading the prompts counts. "
        f"{repetitions}, in which the methods take turns, after a warm-up. auto forgets every "
        "answer before the next call; remembered ones would help it.",
        "Same tokens: in float32, those of plain generate at batch 1. In other dtypes plain generate has other tokens "
        "in a batch than alone: transformers' rows are compared with plain generate at batch 1, and ours with ours "
        "without drafts at batch 1. Tokens per step: what a row gains by one forward of the target, batch 1, "
        f"{results[0].dtype}.",
        f"{system['device']}, {system['threads']} threads, torch {system['torch']}, transformers "
        f"{system['transformers']}, {args.max_new_tokens} new tokens at most.",
        f"{_about(args, model, draft)} Name other models with --target and --draft.",
        *([f'refused: transformers says "{refused}"'] if refused else []),
        sep="\n",
        style="dim",
        highlight=False,
        markup=False,
    )


def _about(args: argparse.Namespace, model: PreTrainedModel, draft: PreTrainedModel | None) -> str:
    sizes = [
        f"{name} {item.num_parameters() / 1e6:.1f} M" for name, item in (("target", model), ("draft", draft)) if item
    ]
    about = f"Parameters: {', '.join(sizes)}."
    if args.parameters:
        about += (
            " The target is cost-matched: a smaller model with further layers, heads and neurons that cost what they "
            "would in a model of that size, and change no logit."
        )
    return about


def title(args: argparse.Namespace, rows: list[dict[str, Any]], prompts: list[list[int]]) -> str:
    """Return the model and the prompts of the measurement in one line."""
    categories = ", ".join(dict.fromkeys(row.get("category", "text") for row in rows))
    lengths = list(map(len, prompts))
    return f"{args.name}: {len(prompts)} prompts ({categories}), {min(lengths)} to {max(lengths)} tokens"


def run(args: argparse.Namespace) -> int:
    start = time.perf_counter()
    console = make_console()
    console.print(f"This takes about {_MINUTES} minutes, on a slow machine more.", style="dim", highlight=False)
    torch.set_num_threads(args.threads)
    check_device(args.device)
    check_output(args.json)
    choose_models(args)
    rows = pick_rows(read_prompts(args.prompts), args.num_prompts)
    check_folder(args.target)
    tokenizer = load_tokenizer(args.target)
    if tokenizer is None:
        raise UsageError(f"the target {args.target!r} has no tokenizer")
    prompts = encode([row["prompt"] for row in rows], tokenizer, max_len=512)
    results: list[Result] = []
    num_sampled = {}
    for dtype in args.dtype:
        model, draft = load(args, dtype)
        assistant = draft or args.heads or "auto"
        if not results:
            stream_answer(console, model, assistant, tokenizer, rows[0], prompts[0])
            console.rule(f"[bold]{escape(title(args, rows, prompts))}[/bold]", align="left")
        for batch_size in dict.fromkeys((1, len(prompts))):
            began = time.perf_counter()
            with console.status(f"measuring in {dtype} at batch {batch_size}"):
                limits = (args.max_new_tokens, args.repetitions, _MAX_SECONDS)
                results += compare(model, all_methods(draft, args.heads), prompts, batch_size, *limits)
            console.print(f"{dtype}, batch {batch_size}: {time.perf_counter() - began:.0f} s", style="dim")
        with console.status(f"sampling in {dtype}"):
            num_sampled[dtype] = check_sampling(model, prompts, args.max_new_tokens, assistant)
    print_speeds(console, results)
    print_categories(console, results, [row.get("category", "text") for row in rows])
    print_notes(console, args, model, draft, results)
    seconds = time.perf_counter() - start
    if args.json:
        write_json(args, model, results, num_sampled, seconds)
    status = print_verdict(console, results, num_sampled, len(prompts))
    console.print(f"({seconds:.0f} s)", style="dim")
    return status


def write_json(
    args: argparse.Namespace,
    model: PreTrainedModel,
    results: Sequence[Result],
    num_sampled: dict[str, int],
    seconds: float,
) -> None:
    counted = [
        item.as_dict()
        | ({} if item.refusal else {"num_different_rows": item.num_different(reference_of(item, results))})
        for item in results
    ]
    content = {
        "environment": environment(model.device, model.dtype),
        "max_new_tokens": args.max_new_tokens,
        "results": counted,
        "num_different_sampled_rows": num_sampled,
        "seconds": seconds,
    }
    args.json.write_text(json.dumps(content, indent=2) + "\n")


def print_verdict(console: Console, results: Sequence[Result], num_sampled: dict[str, int], num_prompts: int) -> int:
    """Print per dtype whether our tokens are those of the reference, and return the exit status."""
    status = 0
    print()
    for dtype, num_of_sampled in num_sampled.items():
        own = [item for item in results if item.is_ours and item.dtype == dtype]
        greedy = sum(item.num_different(reference_of(item, results)) for item in own)
        num_rows = sum(len(item.rows[0]) for item in own)
        reference = "plain generate" if dtype == EXACT else "ours without drafts"
        same = (
            f"{num_rows - greedy} of {num_rows} greedy rows and {num_prompts - num_of_sampled} of {num_prompts} sampled"
        )
        colour = "bold green" if not greedy + num_of_sampled else "bold red" if dtype == EXACT else "yellow"
        console.print(f"[{colour}]{dtype}: {same} have the tokens of {reference}.[/{colour}]")
        status |= dtype == EXACT and bool(greedy + num_of_sampled)
    return int(status)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    set_verbosity_error()
    disable_progress_bar()
    try:
        return run(args)
    except UsageError as error:
        print(f"demo.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("demo.py: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
