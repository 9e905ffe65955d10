"""`python -m benchmarks overhead`: what the machinery costs, with speculation's gains left out."""

import argparse
from typing import Any

import numpy as np
import torch
from rich.console import Console
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel

from hf_smartspec.commands.common.console import make_console, table
from hf_smartspec.commands.common.models import use_machine
from hf_smartspec.commands.common.outputs import check_output, write_json
from hf_smartspec.commands.common.progress import track
from hf_smartspec.commands.common.timing import Stopwatch, environment, side_by_side
from hf_smartspec.drafts.tree import DraftTree
from hf_smartspec.generate import enabled
from hf_smartspec.prepare.config import SmartSpecConfig
from hf_smartspec.target_model.compat import cache_name
from hf_smartspec.target_model.layout.rows import RowInput
from hf_smartspec.target_model.written import packed_forward

from .arguments import QUANTIZED
from .host import host_time, print_host_time
from .int8 import int8_speed, print_int8_speed
from .stubs import llama_config

CONTEXT = 256  # cached tokens per row before the measured forward


def run(args: argparse.Namespace) -> int:
    check_output(args.json)
    use_machine(args)
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    console = make_console()
    results: dict[str, Any] = {"environment": environment(device, dtype), "context": CONTEXT}
    try:
        if "host" in args.parts:
            results["host"] = host_time(args.host_steps)
        if QUANTIZED in args.parts:
            sizes = (args.num_prompts, args.max_new_tokens, args.repeats or 3)
            results["quantized"] = []
            for row in int8_speed(args.parameters, args.prompts, args.dtype, *sizes):
                results["quantized"].append(row)
        if set(args.parts) - {"host", QUANTIZED}:
            _measure_model(args, results, device, dtype)
    finally:  # interrupted, what was measured so far is still worth reading
        _print(console, results)
        if args.json:
            write_json(args.json, results)
    return int(any(row["is_met"] is False for row in results["host"])) if "host" in results else 0


def _measure_model(args: argparse.Namespace, results: dict[str, Any], device: torch.device, dtype: torch.dtype) -> None:
    """The parts that run a model."""
    model = random_llama(num_layers=args.layers).to(device=device, dtype=dtype)  # type: ignore[call-arg]
    results["parameters"] = model.num_parameters()
    if "forward" in args.parts:
        results["forward"] = forward_overhead(model, args.batch_sizes, args.widths, args.repeats or 7)
    if "step" in args.parts:
        draft = random_llama(num_layers=1).to(device=device, dtype=dtype)  # type: ignore[call-arg]
        with track(desc="measuring steps of the engine"):
            results["step"] = step_overhead(model, draft, batch_size=8, repeats=1)
    if "none" in args.parts:
        # In float32, where both decode the same tokens: in half precision near-ties let rows end at other lengths.
        with track(desc="measuring without speculation"):
            results["no_speculation"] = no_speculation(model.float(), batch_size=8, new_tokens=32)


def random_llama(num_layers: int, seed: int = 0) -> LlamaForCausalLM:
    """A Llama of random weights; 15 layers have 205 M parameters. Its cost is real, its text is not."""
    torch.manual_seed(seed)
    sizes = {"num_key_value_heads": 4, "intermediate_size": 2880, "max_position_embeddings": 4096}
    config = llama_config(1024, num_layers, num_heads=16, **sizes)
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def forward_overhead(
    model: PreTrainedModel, batch_sizes: list[int], widths: list[int], repeats: int
) -> list[dict[str, float]]:
    """Plain forward over `[batch, width]` tokens against the packed forward over the same tokens."""
    settings = [(batch_size, width) for batch_size in batch_sizes for width in widths]
    rows = []
    for batch_size, width in track(settings, desc="forward"):
        ids = torch.randint(3, model.config.vocab_size, (batch_size, CONTEXT + width), device=model.device)
        functions = {"plain": _plain_forward(model, ids, width), "packed": _packed_forward(model, ids, width)}
        seconds = side_by_side(functions, repeats, model.device)
        ratio = seconds["packed"] / seconds["plain"]
        rows.append({"batch_size": batch_size, "width": width, **seconds, "ratio": ratio})
    return rows


def _plain_forward(model, ids, width):
    cache = DynamicCache(config=model.config)
    given = {cache_name(model.forward): cache}
    model(input_ids=ids[:, :CONTEXT], **given, logits_to_keep=1)

    def forward():
        model(input_ids=ids[:, CONTEXT:], **given)
        cache.crop(-width)

    return forward


def _packed_forward(model, ids, width):
    tokens = ids.cpu().numpy()
    packed = packed_forward(model, len(tokens), CONTEXT + width)
    rows = [packed.add() for _ in tokens]
    packed.forward([RowInput(row, line[:CONTEXT]) for row, line in zip(rows, tokens)])
    trees = [DraftTree.chain(line[CONTEXT + 1 :]) for line in tokens]

    def forward():
        feeds = [line[CONTEXT : CONTEXT + 1] for line in tokens]
        packed.forward([RowInput(row, feed, tree) for row, feed, tree in zip(rows, feeds, trees)])
        for row in rows:
            row.length = CONTEXT

    return forward


def step_overhead(model: PreTrainedModel, draft: PreTrainedModel, batch_size: int, repeats: int = 3) -> dict[str, Any]:
    """The share of generation time that is spent outside the two models' forwards, by source."""
    ids = torch.randint(3, model.config.vocab_size, (batch_size, 64), device=model.device)
    sources = {"draft model, 4 nodes": SmartSpecConfig(draft, num_nodes=4)}
    sources["draft model, tree of 8"] = SmartSpecConfig(draft, num_nodes=8, width=3)
    sources["prompt lookup, 4 nodes"] = SmartSpecConfig("prompt_lookup", num_nodes=4)
    results = {}
    for name, config in sources.items():
        shares = []
        for _ in range(repeats + 1):
            target_watch, draft_watch = Stopwatch(), Stopwatch()
            with enabled(model), target_watch.attached_to(model), draft_watch.attached_to(draft):
                output = model.generate(
                    ids, assistant=config, max_new_tokens=24, eos_token_id=None, return_dict_in_generate=True
                )
            total = output.statistics.seconds_total
            inside = target_watch.seconds + draft_watch.seconds
            shares.append({"total": total, "inside": inside, "steps": output.statistics.forwards})
        results[name] = sorted(shares[1:], key=lambda item: 1 - item["inside"] / item["total"])[len(shares[1:]) // 2]
        results[name]["outside_share"] = 1 - results[name]["inside"] / results[name]["total"]
    return results


def no_speculation(model: PreTrainedModel, batch_size: int, new_tokens: int = 64, repeats: int = 3) -> dict[str, float]:
    """Plain `generate` against the engine without drafts: ragged prompts, rows that end at different lengths."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(8, 96, batch_size)
    ids = torch.zeros(batch_size, int(lengths.max()), dtype=torch.long, device=model.device)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, -length:] = torch.from_numpy(rng.integers(3, model.config.vocab_size, length))
        mask[row, -length:] = 1
    arguments: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": new_tokens, "do_sample": False}
    arguments["eos_token_id"] = _ends(model.generate(ids, **arguments, eos_token_id=None), ids.shape[1])
    outputs = {}

    def plain():
        outputs["plain"] = model.generate(ids, **arguments)

    def engine():
        outputs["engine"] = model.generate(ids, **arguments, assistant="none")

    with enabled(model):
        seconds = side_by_side({"plain": plain, "engine": engine}, repeats, model.device, warmup=1)
    new = {name: int((output[:, ids.shape[1] :] != 0).sum()) for name, output in outputs.items()}
    return {
        **{f"{name}_seconds": value for name, value in seconds.items()},
        **{f"{name}_tokens": value for name, value in new.items()},
        "speedup": seconds["plain"] / seconds["engine"],
    }


def _ends(sequences: torch.Tensor, prompt_length: int) -> list[int]:
    """Token ids that, taken as ends of sequence, stop the rows at lengths spread over the whole run."""
    generated = sequences[:, prompt_length:].tolist()
    return [line[(row + 1) * len(line) // len(generated) - 1] for row, line in enumerate(generated)]


def _print(console: Console, results: dict[str, Any]) -> None:
    """What has been measured."""
    if "host" in results:
        print_host_time(console, results["host"])
    if "forward" in results:
        _print_forward(console, results)
    if "step" in results:
        _print_step(console, results["step"])
    if "no_speculation" in results:
        _print_no_speculation(console, results["no_speculation"])
    if results.get("quantized"):
        print_int8_speed(console, results["quantized"], results["environment"]["dtype"])
    console.print(f"[dim]{results['environment']}[/dim]", soft_wrap=True)


def _print_forward(console: Console, results: dict[str, Any]) -> None:
    title = f"Packed against plain forward, {results['parameters'] / 1e6:.0f} M parameters, context {CONTEXT}"
    lines = table(title, "batch", "tokens per row", "plain ms", "packed ms", "packed / plain", num_text=0)
    for row in results["forward"]:
        values = (f"{row['plain'] * 1e3:.1f}", f"{row['packed'] * 1e3:.1f}", f"{row['ratio']:.3f}")
        lines.add_row(str(row["batch_size"]), str(row["width"]), *values)
    console.print(lines)
    console.print(f"median packed / plain: {np.median([row['ratio'] for row in results['forward']]):.3f}")


def _print_step(console: Console, results: dict[str, Any]) -> None:
    lines = table("A step of the engine at batch 8", "source", "ms per step", "outside the forwards")
    for name, row in results.items():
        lines.add_row(name, f"{row['total'] / row['steps'] * 1e3:.1f}", f"{row['outside_share']:.1%}")
    console.print(lines)


def _print_no_speculation(console: Console, row: dict[str, float]) -> None:
    console.print(
        f"No speculation, float32, batch 8, ragged prompts and ends: plain {row['plain_seconds']:.2f} s "
        f"({row['plain_tokens']} tokens), engine {row['engine_seconds']:.2f} s ({row['engine_tokens']} tokens), "
        f"speed-up {row['speedup']:.2f}"
    )
