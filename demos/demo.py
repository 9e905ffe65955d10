"""Speculative decoding with hf-smartspec, beside plain `generate` and transformers' own assisted decoding.

    python demos/demo.py                                # the embedded models, on held-out prompts
    python demos/demo.py --parameters 0                 # at their own size
    python demos/demo.py --target Qwen/Qwen2.5-1.5B-Instruct --draft Qwen/Qwen2.5-0.5B-Instruct

Streams one answer, then measures every way of decoding at batch 1 and at batch 8, and compares the tokens with plain
generate's. Exit status 1 if ours differ in float32.
"""

import argparse
import json
import sys
import time
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

import hf_smartspec
from compare import Result, all_methods, compare
from hf_smartspec.commands.common.arguments import DTYPES, UsageError
from hf_smartspec.commands.common.console import environment, make_console, table
from hf_smartspec.commands.common.cost_matched import enlarge
from hf_smartspec.commands.common.exactness import find_differences
from hf_smartspec.commands.common.models import (
    check_device,
    encode,
    left_padded,
    load_draft,
    load_model,
    load_tokenizer,
    read_prompts,
)
from hf_smartspec.commands.common.outputs import check_output
from hf_smartspec.commands.common.runs import Decoding, decode_plainly, decode_speculatively

HERE = Path(__file__).resolve().parent
_NUM_PARAMETERS = 200e6  # what the embedded target costs, so that its speed says something about real models
_MAX_SECONDS = 75.0  # per batch size, warm-up included: as many repetitions as begin within, and at least one
_MAX_SPREAD = 1.3
_MINUTES = 3  # two batch sizes, loading, an answer and the check of sampling


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--models", type=Path, default=HERE / "models", metavar="DIR", help="holds target/ and draft/")
    parser.add_argument("--target", metavar="MODEL", help="another target: folder or hub id")
    parser.add_argument("--draft", metavar="MODEL", help="another draft of the same tokenizer: folder or hub id")
    parser.add_argument(
        "--parameters",
        type=float,
        metavar="N",
        help="enlarge the embedded target to the cost of so many parameters, with unchanged outputs; 0: as it is "
        "(default: 200e6; 0 with --target)",
    )
    parser.add_argument("--prompts", type=Path, default=HERE / "prompts.jsonl", metavar="FILE", help=".jsonl or .txt")
    parser.add_argument("--num-prompts", type=int, default=8, metavar="N", help="default: 8, which is the large batch")
    parser.add_argument("--max-new-tokens", type=int, default=48, metavar="N", help="default: 48")
    parser.add_argument(
        "--repetitions", type=int, default=5, metavar="N", help="at most; medians are shown (default: 5)"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="default: float32, where equality is exact")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="CPU threads (default: 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    args = parser.parse_args(argv)
    for name in ("num_prompts", "max_new_tokens", "repetitions", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if args.parameters is None:
        args.parameters = 0.0 if args.target else _NUM_PARAMETERS
    return args


def pick_rows(rows: list[dict[str, Any]], num_rows: int) -> list[dict[str, Any]]:
    """One row of every category in turn, so that any number of them is mixed."""
    by_category: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_category.setdefault(row.get("category", ""), []).append(row)
    turns = zip_longest(*by_category.values())
    return [row for turn in turns for row in turn if row is not None][:num_rows]


def load(args: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedModel, PreTrainedTokenizerBase]:
    target, draft = (str(getattr(args, name) or args.models / name) for name in ("target", "draft"))
    if not (args.target and args.draft) and not (args.models / "target" / "config.json").exists():
        raise UsageError(
            f"no models in {args.models}: train them (demos/train_models.py), or name --target and --draft"
        )
    model = load_model(target, args.dtype, args.device)
    tokenizer = load_tokenizer(target)
    if tokenizer is None:
        raise UsageError(f"the target {target!r} has no tokenizer")
    if args.parameters:
        try:
            model = enlarge(model, args.parameters)
        except ValueError as error:
            raise UsageError(str(error)) from error
    return model, load_draft(draft, model, args.dtype), tokenizer


def stream_answer(
    console: Console,
    model: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    row: dict[str, Any],
    prompt: list[int],
    max_new_tokens: int,
) -> None:
    """Prints one answer while it is written, a few tokens at a time."""
    console.rule("[bold]One answer, streamed: generate(..., assistant=draft, streamer=...)[/bold]", align="left")
    console.print(escape(row["prompt"].strip()), style="dim", highlight=False)
    print(flush=True)
    inputs = left_padded([prompt], tokenizer.pad_token_id or 0, model.device)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    with hf_smartspec.enabled(model):
        output = model.generate(
            **inputs,
            assistant=draft,
            streamer=streamer,
            do_sample=False,
            max_new_tokens=max_new_tokens,
            return_dict_in_generate=True,
        )
    counts = output.statistics
    console.print(
        f"\n[dim]{counts.generated_tokens} tokens in {counts.steps} steps, {counts.accepted_tokens} of "
        f"{counts.drafted_tokens} drafted tokens accepted[/dim]\n",
        highlight=False,
    )


def print_results(console: Console, results: list[Result]) -> None:
    columns = ("decoding", "batch", "tokens/s", "x plain", "per step", "drafted", "accepted", "identical")
    lines = table("The same prompts, greedy, with every method's defaults", *columns)
    plain = {item.batch_size: item for item in results if item.name == "plain generate"}
    for item, following in zip_longest(results, results[1:]):
        ends_section = following is not None and following.batch_size != item.batch_size
        lines.add_row(item.name, str(item.batch_size), *_cells(item, plain[item.batch_size]), end_section=ends_section)
    console.print(lines)


def _cells(item: Result, plain: Result) -> list[str]:
    if item.refusal is not None:
        return ["refused", *"-" * 5]
    is_plain = item.num_drafted == 0 and not item.is_ours
    identical = "[green]yes[/green]"
    if item.different_rows:
        identical = f"[red]no: {len(item.different_rows)} of {item.num_rows}[/red]"
    return [
        f"{item.tokens_per_second:.0f}",
        f"{item.speedup(plain):.2f}",
        f"{item.mean_accepted_length:.2f}",
        "-" if is_plain else str(item.num_drafted),
        "-" if is_plain else str(item.num_accepted),
        identical,
    ]


def check_sampling(
    model: PreTrainedModel, draft: PreTrainedModel, prompts: list[list[int]], max_new_tokens: int
) -> int:
    """Rows of one sampled batch that differ from plain `generate` with the same noise."""
    inputs, decoding = left_padded(prompts, model.generation_config.pad_token_id or 0, model.device), Decoding(seed=1)
    plain = decode_plainly(model, inputs, decoding, max_new_tokens)
    own = decode_speculatively(model, inputs, decoding, max_new_tokens, draft)
    return len(find_differences(plain.tokens, own.tokens))


def print_notes(
    console: Console, args: argparse.Namespace, model: PreTrainedModel, draft: PreTrainedModel, results: list[Result]
) -> None:
    system = environment(model.device, model.dtype)
    plain = results[0]
    step = 1e3 / plain.tokens_per_second
    sizes = [f"{item.num_parameters() / 1e6:.1f} M" for item in (model, draft)]
    spread = max(item.spread for item in results if item.seconds)
    if spread > _MAX_SPREAD:
        console.print(
            f"[yellow]Repetitions of one and the same call differ by {spread:.1f} x: other programs are running, "
            "and the speeds above mean little. Measure again on a quiet machine, or with --threads 1.[/yellow]\n",
            highlight=False,
        )
    turns = {len(item.seconds) for item in results if item.seconds}
    refused = next((item.refusal for item in results if item.refusal), None)
    console.print(
        "per step: tokens a row gains by one forward of the target. Medians of "
        f"{min(turns) if len(turns) == 1 else f'{min(turns)} to {max(turns)}'} repetitions that take turns, after a "
        "warm-up.",
        f"Batch 1 decodes {results[0].num_rows} of the {results[-1].num_rows} prompts, one after another; batch "
        f"{results[-1].batch_size} all of them. auto is made to forget "
        "every answer before the next call; remembered ones would help it.",
        f"{system['device']}, {system['threads']} threads, {system['dtype']}, torch {system['torch']}, transformers "
        f"{system['transformers']}, {args.max_new_tokens} new tokens at most.",
        f"Target {sizes[0]} parameters, draft {sizes[1]}: a plain step takes {step:.1f} ms. {_about(args)}Name other "
        "models with --target and --draft.",
        *([f'refused: transformers says "{refused}"'] if refused else []),
        sep="\n",
        style="dim",
        highlight=False,
        markup=False,
    )


def _about(args: argparse.Namespace) -> str:
    if args.parameters:
        return (
            "The target is cost-matched: the embedded model with further layers, heads and neurons that cost "
            "what they would in a model of that size, and change no logit. "
        )
    return "The smaller the models, the more of a step is Python rather than arithmetic, and the less there is to win. "


def run(args: argparse.Namespace) -> int:
    start = time.perf_counter()
    console = make_console()
    console.print(
        f"This takes about {_MINUTES} minutes, on a slow machine more: at most {_MAX_SECONDS:.0f} s at each of two "
        "batch sizes, and an answer before them.",
        style="dim",
        highlight=False,
    )
    torch.set_num_threads(args.threads)
    check_device(args.device)
    check_output(args.json)
    rows = pick_rows(read_prompts(args.prompts), args.num_prompts)
    model, draft, tokenizer = load(args)
    prompts = encode([row["prompt"] for row in rows], tokenizer, max_len=512)
    stream_answer(console, model, draft, tokenizer, rows[0], prompts[0], args.max_new_tokens)

    categories = ", ".join(dict.fromkeys(row.get("category", "text") for row in rows))
    lengths = [len(prompt) for prompt in prompts]
    size = f"; target cost-matched to {args.parameters / 1e6:.0f} M" if args.parameters else ""
    console.rule(
        f"[bold]{len(prompts)} prompts ({categories}), {min(lengths)} to {max(lengths)} tokens{size}[/bold]",
        align="left",
    )
    results: list[Result] = []
    for batch_size in dict.fromkeys((1, len(prompts))):
        with console.status(f"measuring at batch {batch_size}"):
            # One by one takes longest: a few of the prompts are enough there.
            share = 4 if args.parameters else 2
            chosen = prompts[: max(len(prompts) // share, 1)] if batch_size == 1 else prompts
            methods, limits = all_methods(draft), (args.max_new_tokens, args.repetitions, _MAX_SECONDS)
            results += compare(model, methods, chosen, batch_size, *limits)
    print_results(console, results)
    num_sampled = check_sampling(model, draft, prompts, args.max_new_tokens)
    console.print(
        f"Sampled with seed 1 at batch {len(prompts)}: {len(prompts) - num_sampled} of {len(prompts)} rows have the "
        "tokens of plain generate with the same noise.\n",
        highlight=False,
    )
    print_notes(console, args, model, draft, results)
    num_different = num_sampled + sum(len(item.different_rows) for item in results if item.is_ours)
    seconds = time.perf_counter() - start
    if args.json:
        write_json(args, model, results, num_sampled, seconds)
    return _verdict(console, args.dtype, num_different, seconds)


def write_json(
    args: argparse.Namespace, model: PreTrainedModel, results: list[Result], num_sampled: int, seconds: float
) -> None:
    content = {
        "environment": environment(model.device, model.dtype),
        "max_new_tokens": args.max_new_tokens,
        "results": [item.as_dict() for item in results],
        "num_different_sampled_rows": num_sampled,
        "seconds": seconds,
    }
    args.json.write_text(json.dumps(content, indent=2) + "\n")


def _verdict(console: Console, dtype: str, num_different: int, seconds: float) -> int:
    if not num_different:
        console.print(f"\n[bold green]Ours: plain generate's tokens in every row.[/bold green] ({seconds:.0f} s)")
        return 0
    if dtype != "float32":
        console.print(
            f"\n[yellow]{num_different} rows of ours differ from plain generate's[/yellow]: in {dtype}, batches of "
            "other shapes round differently. `smartspec verify` tells ties from errors.",
            highlight=False,
        )
        return 0
    console.print(f"\n[bold red]{num_different} rows of ours differ from plain generate's.[/bold red]")
    return 1


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
