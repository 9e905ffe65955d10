"""`smartspec bench generate`: `assistant=` against plain `generate` and transformers' own, on real prompts."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..config import SmartSpecConfig
from .generate_loop import DataSet, Method, Results, Settings, measure
from .generate_report import has_differences, plot, print_results, summaries, worst
from .load_setup import (
    add_output_arguments,
    add_target_arguments,
    check_outputs,
    command_of,
    demo_folder,
    load_target,
    max_prompt_len,
)
from .loading import UsageError, encode, load_draft
from .replay_data import Fields, Texts, read_requests
from .report import make_console
from .runs import eos_ids
from .timing import environment
from .verify import positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="FILE",
        help="prompts and responses, .jsonl or .jsonl.gz; one is one data set (default: the demo's prompts)",
    )  # fmt: skip
    add_target_arguments(parser)
    parser.add_argument("--batch-size", type=positive, nargs="+", default=[1, 8], metavar="B", help="default: 1 8")
    parser.add_argument("--limit", type=positive, default=8, metavar="N", help="requests per data set (default: 8)")
    parser.add_argument("--max-new-tokens", type=positive, default=96, metavar="N", help="default: 96")
    parser.add_argument(
        "--max-prompt", type=positive, default=1024, metavar="N", help="tokens of a prompt, its end (default: 1024)"
    )
    parser.add_argument(
        "--assistant", nargs="+", metavar="MODEL_OR_PRESET",
        help="what `assistant=` is; of draft models, transformers' `assistant_model=` is measured too (default: auto, "
        "prompt_lookup, and the demo's draft for the demo's target)",
    )  # fmt: skip
    parser.add_argument(
        "--replay", action="store_true",
        help="the target runs at its cost, but picks the recorded responses, so that drafts meet real text",
    )  # fmt: skip
    parser.add_argument("--repetitions", type=positive, default=1, metavar="N", help="timed rounds (default: 1)")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    check_outputs(args)
    texts = _read(args)
    model, tokenizer = _load_target(args)
    methods = _methods(args, model)
    data = [_data_set(name, requests, tokenizer, model, args) for name, requests in texts.items()]
    console = make_console()
    report: dict[str, Any] = {
        "command": command_of(args) | {"files": list(texts)},
        "parameters": model.num_parameters(),
    }
    report["environment"] = environment(model.device, model.dtype)
    _print_setting(report, console)
    results: Results = {}
    try:
        settings = Settings(args.max_new_tokens, args.replay, args.repetitions)
        measure(model, methods, data, args.batch_size, settings, results)
    finally:  # interrupted, what was measured so far is still worth reading
        if any(tally.calls for tallies in results.values() for tally in tallies.values()):
            print_results(results, console, args.replay)
            if args.json:
                report |= {"results": summaries(results), "worst_speedup": worst(results)}
                args.json.write_text(json.dumps(report, indent=2) + "\n")
            if args.plot:
                plot(results, args.plot, args.replay)
    return 1 if has_differences(results, [method.name for method in methods if method.assistant is not None]) else 0


def _read(args: argparse.Namespace) -> dict[str, list[Texts]]:
    """The first requests of every file; of the demo's prompts, some of every category."""
    if args.files:
        return {str(path): read_requests(path, Fields(), args.limit) for path in args.files}
    requests = read_requests(demo_folder() / "prompts.jsonl", Fields(), None)
    return {"prompts.jsonl": requests[:: max(len(requests) // args.limit, 1)][: args.limit]}


def _load_target(args: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    model, tokenizer = load_target(args)
    name = args.model or "the demo's target"
    if model.config.is_encoder_decoder:
        raise UsageError(f"--model: {name!r} is no decoder-only model")
    if args.replay and not eos_ids(model):
        raise UsageError(f"--replay: {name!r} has no end-of-sequence token to end responses with")
    return model, tokenizer


def _methods(args: argparse.Namespace, model: PreTrainedModel) -> list[Method]:
    """This library's, then transformers' own."""
    names = args.assistant or ["auto", "prompt_lookup"]
    if not args.assistant and not args.model:
        names = [*names, str(demo_folder() / "models" / "draft")]
    own, others = [], [Method("transformers, prompt lookup", arguments={"prompt_lookup_num_tokens": 10})]
    names = list(dict.fromkeys(names))
    folders = [Path(name).name for name in names]
    for name, folder in zip(names, folders):
        if not (Path(name).is_dir() or ("/" in name and ":" not in name)):  # else the name of a model
            own.append(Method(name, assistant=name))
            continue
        draft, shown = load_draft(name, model, args.dtype), folder if folders.count(folder) == 1 else name
        own.append(Method(shown, assistant=draft, draft=draft))
        others.append(Method(f"transformers, {shown}", arguments={"assistant_model": draft}, draft=draft))
    for method in own:
        try:
            SmartSpecConfig(method.assistant).source_for(model)
        except (TypeError, ValueError, OSError) as error:
            raise UsageError(f"--assistant: {error}") from error
    return [*own, *others]


def _data_set(
    name: str,
    requests: Sequence[Texts],
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    args: argparse.Namespace,
) -> DataSet:
    """Conversations are one user's turn; of responses, as much as is generated."""
    max_len = max_prompt_len(args, model)
    prompts, responses = [], []
    for request in requests:
        ids = encode(["\n".join(request.context)], tokenizer, max_len)
        if ids:
            prompts += ids
            response = tokenizer(request.response, add_special_tokens=False, verbose=False).input_ids
            responses.append(np.array(response[: args.max_new_tokens], np.int64))
    if not prompts:
        raise UsageError(f"{name!r}: the tokenizer makes no tokens of the prompts")
    return DataSet(name, prompts, responses)


def _print_setting(report: dict[str, Any], console: Console) -> None:
    command, system = report["command"], report["environment"]
    outputs = "recorded responses, replayed" if command["replay"] else "the model's own outputs"
    console.print(
        f"[bold]smartspec bench generate[/bold] {escape(command['model'] or 'the demo target')}, "
        f"{report['parameters'] / 1e6:.0f} M parameters, {system['dtype']}\n{outputs}, greedy, up to "
        f"{command['max_new_tokens']} new tokens; {command['limit']} requests per data set\n"
        f"{escape(str(system['device']))}, {system['threads']} threads, torch {system['torch']}, transformers "
        f"{system['transformers']}\n",
        highlight=False,
    )
