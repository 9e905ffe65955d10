"""`smartspec bench generate`: `assistant=` against plain `generate` and transformers' own, on real prompts."""

import argparse
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...target_model.compat import is_stateful
from ..common.arguments import UsageError, command_of
from ..common.console import environment, make_console, print_head
from ..common.models import demo_folder
from ..common.names import is_model, parts_of, shown
from ..common.outputs import check_outputs, write_json
from ..common.recordings import DataSet, Fields, Texts, answered, read_requests
from ..common.setup import check_replay, drafter_files, load_target, max_prompt_len, missing_arguments
from .loop import Method, Results, Settings, measure
from .report import has_differences, plot, print_results, summaries, worst


def run(args: argparse.Namespace) -> int:
    check_outputs(args)
    texts = _read(args)
    model, tokenizer = _load_target(args)
    methods = _methods(args, model)
    sizes = (args.limit, args.remember, max_prompt_len(args, model), args.max_new_tokens)
    data = [DataSet.of(name, requests, tokenizer, *sizes) for name, requests in texts.items()]
    if not args.replay:
        data = [item._replace(past=answered(item.past, model, args.max_new_tokens)) for item in data]
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
                write_json(args.json, report)
            if args.plot:
                plot(results, args.plot, args.replay)
    return 1 if has_differences(results, [method.name for method in methods if method.assistant is not None]) else 0


def _read(args: argparse.Namespace) -> dict[str, list[Texts]]:
    """Return the requests of every file, by default prompts of every category of the demo's."""
    if args.files:
        return {str(path): read_requests(path, Fields(), None, args.replay) for path in args.files}
    requests = read_requests(demo_folder(*missing_arguments(args)) / "prompts.jsonl", Fields(), None)
    step = max((len(requests) - args.remember) // args.limit, 1)
    return {"prompts.jsonl": requests[: args.remember] + requests[args.remember :: step]}


def _load_target(args: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    model, tokenizer = load_target(args)
    name = args.model or "the demo's target"
    if model.config.is_encoder_decoder:
        raise UsageError(f"--model: {name!r} is no decoder-only model")
    check_replay(args, model)
    return model, tokenizer


def _methods(args: argparse.Namespace, model: PreTrainedModel) -> list[Method]:
    """Return this library's methods, then transformers' own."""
    names = args.assistant or ["auto", "prompt_lookup"]
    if not args.assistant and not args.model:
        names = [*names, str(demo_folder("--model") / "models" / "draft")]
    own, others = [], [Method("transformers, prompt lookup", arguments={"prompt_lookup_num_tokens": 10})]
    files = drafter_files(args, model, "--assistant")
    names = list(dict.fromkeys(names))
    for name in names:
        items, title = parts_of(name), _shown(name, names)
        assistant = files.named(name).assistant
        models = [files.loaded(item) for item in items if is_model(item)]
        draft = next((item for item in models if isinstance(item, PreTrainedModel)), None)
        own.append(Method(title, assistant=assistant, draft=draft))
        if len(items) == 1 and draft is not None:
            others.append(Method(f"transformers, {title}", arguments={"assistant_model": draft}, draft=draft))
    return own if is_stateful(model) else [*own, *others]  # transformers refuses to speculate with states


def _shown(name: str, names: Sequence[str]) -> str:
    """Return a name for tables: models by the last part of their path, where that is unique."""
    return shown(name) if [shown(other) for other in names].count(shown(name)) == 1 else name


def _print_setting(report: dict[str, Any], console: Console) -> None:
    command = report["command"]
    outputs = "recorded responses, replayed" if command["replay"] else "the model's own outputs"
    past = f", {command['remember']} remembered by suffix trees" if command["remember"] else ""
    about = f"{command['model'] or 'the demo target'}, {report['parameters'] / 1e6:.0f} M parameters"
    sizes = f"up to {command['max_new_tokens']} new tokens; {command['limit']} requests per data set{past}"
    print_head(console, "bench generate", about, report["environment"], f"{outputs}, greedy, {sizes}")
