"""What int8 is worth: the embedded target, cost-matched, decodes real prompts one at a time in both, side by side."""

import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import GenerationConfig, PreTrainedModel

from hf_smartspec.commands.common.arguments import UsageError
from hf_smartspec.commands.common.console import table
from hf_smartspec.commands.common.cost_matched import enlarge
from hf_smartspec.commands.common.data_sets import DataSet
from hf_smartspec.commands.common.demo import demo_folder
from hf_smartspec.commands.common.models import load_model, load_tokenizer
from hf_smartspec.commands.common.progress import track
from hf_smartspec.commands.common.recordings import Fields, read_requests
from hf_smartspec.commands.common.timing import side_by_side
from hf_smartspec.cpu.quantized import quantize
from hf_smartspec.generate import enabled
from hf_smartspec.prepare.resolve import suffix_trees

WAYS = {"plain": {}, "none": {"assistant": "none"}, "auto": {"assistant": "auto"}}
_WARMUP = 4  # tokens, before which the models are planned, measured and compiled
_MAX_PROMPT = 256  # tokens of a prompt, its end


def int8_speed(
    sizes: Sequence[float], path: Path | None, dtype: str, num_prompts: int, num_tokens: int, repeats: int
) -> Iterator[dict[str, Any]]:
    """
    One row for every size and way to decode, as soon as it is known: tokens per second at batch 1 in `dtype` and in
    int8, and their ratio. No answer is remembered.

    Args:
        sizes (sequence of `float`): Parameters of the target.
        path (`Path`, *optional*): Of the prompts; else the demo's.

    Raises:
        UsageError: for prompts or sizes that cannot be used, and CPUs that have no int8 products.
    """
    folder = demo_folder("--model")
    name = str(folder / "models" / "target")
    small, tokenizer, path = load_model(name, dtype), load_tokenizer(name), path or folder / "prompts.jsonl"
    assert tokenizer is not None, "the demo's target has one"
    requests = read_requests(path, Fields(), None, needs_responses=False)
    data = DataSet.of(str(path), requests, tokenizer, num_prompts, 0, _MAX_PROMPT, num_tokens)
    prompts = [torch.tensor(prompt)[None] for prompt in data.prompts]
    with track(total=len(sizes) * len(WAYS), desc=f"{dtype} against int8") as progress:
        for size in sizes:
            try:
                model = enlarge(small, size)
                quantized = quantize(copy.deepcopy(model))
            except ValueError as error:
                raise UsageError(f"--parameters {size:.0f}: {error}") from error
            for row in _compare(model, quantized, prompts, num_tokens, repeats):
                progress.update(1)
                yield row


def _compare(
    model: PreTrainedModel, quantized: PreTrainedModel, prompts: Sequence[torch.Tensor], num_tokens: int, repeats: int
) -> Iterator[dict[str, Any]]:
    models = {"full": model, "int8": quantized}
    for item in models.values():
        item.generation_config = GenerationConfig(pad_token_id=0)
    new, mib = num_tokens * len(prompts), {name: _num_mib(item) for name, item in models.items()}
    with enabled(model), enabled(quantized):
        for way, arguments in WAYS.items():
            for item in models.values():
                _decoding(item, prompts[:1], _WARMUP, arguments)()
            functions = {name: _decoding(item, prompts, num_tokens, arguments) for name, item in models.items()}
            seconds = side_by_side(functions, repeats, model.device, warmup=0)
            speed = {name: new / value for name, value in seconds.items()}
            ratio = speed["int8"] / speed["full"]
            yield {"parameters": model.num_parameters(), "way": way, **speed, "ratio": ratio, "mib": mib}


def _num_mib(model: PreTrainedModel) -> float:
    return sum(weight.nbytes for weight in model.parameters()) / 2**20


def _decoding(
    model: Any, prompts: Sequence[torch.Tensor], num_tokens: int, arguments: dict[str, Any]
) -> Callable[[], object]:
    def decode() -> None:
        suffix_trees(model).remove_namespace("")
        for ids in prompts:
            model.generate(ids, max_new_tokens=num_tokens, eos_token_id=None, do_sample=False, **arguments)

    return decode


def print_int8_speed(console: Console, rows: Sequence[dict[str, Any]], dtype: str) -> None:
    title = "Tokens per second at batch 1, cost-matched targets"
    lines = table(title, "parameters", "decoding", "MiB", "MiB in int8", dtype, "int8", "int8 / " + dtype, num_text=2)
    for row in rows:
        mib = (f"{row['mib']['full']:,.0f}", f"{row['mib']['int8']:,.0f}")
        speed = (f"{row['full']:.1f}", f"{row['int8']:.1f}", f"{row['ratio']:.2f}")
        lines.add_row(f"{row['parameters'] / 1e6:.0f} M", row["way"], *mib, *speed)
    console.print(lines)
