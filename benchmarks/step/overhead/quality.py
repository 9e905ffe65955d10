"""Quality of int8 and int4: perplexity of recorded responses, in each dtype and quantized."""

import math
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from hf_smartspec.commands.common.models import demo_folder, load_model
from hf_smartspec.commands.common.recordings import Fields, Recording, read_requests, tokenized, tokenizer_of
from hf_smartspec.cpu.quantized import KINDS, quantize

from ...kit.models import real_model
from ...kit.session import Case, Section
from ...kit.tables import Column, Row

WAYS: dict[str, tuple[str, str | None]] = {"float32": ("float32", None), "bfloat16": ("bfloat16", None)}
WAYS |= {f"{kind}, from {dtype}": (dtype, kind) for kind in KINDS for dtype in ("float32", "bfloat16")}
_MAX_PROMPT, _MAX_RESPONSE = 256, 256  # tokens


def section(name: str | None, path: Path | None) -> Section:
    """
    Return for every dtype, int8 and int4 the perplexity of the file's responses after their prompts, how much higher it
    is than in float32, and the share of tokens after which the likeliest next token is float32's.

    Args:
        name (`str`, *optional*): The model; by default SmolLM2 where it is in the cache, else the embedded target.
        path (`Path`, *optional*): A file of prompts and responses; by default the demo's.
    """
    name = name or real_model() or str(demo_folder("--model") / "models" / "target")
    path = path or demo_folder("--prompts") / "prompts.jsonl"

    @cache
    def texts() -> list[Recording]:
        requests = read_requests(path, Fields(), None)
        return [item for item in tokenized(requests, tokenizer_of(name), _MAX_PROMPT, _MAX_RESPONSE)]

    @cache
    def reference() -> tuple[float, torch.Tensor]:
        return _judged(load_model(name, "float32"), texts())

    def measure(dtype: str, kind: str | None) -> Row:
        model = load_model(name, dtype)
        perplexity, likeliest = _judged(quantize(model, kind) if kind else model, texts())
        expected, own = reference()
        agreement = float((likeliest == own).double().mean())
        return {"perplexity": perplexity, "change": perplexity / expected - 1, "agreement": agreement}

    def cases() -> Iterator[Case]:
        for way, arguments in WAYS.items():
            yield Case(way, partial(measure, *arguments))

    columns = (
        Column("perplexity", "perplexity", "{:.3f}"),
        Column("against float32", "change", "{:+.2%}"),
        Column("likeliest token as in float32", "agreement", "{:.1%}"),
    )
    return Section("quality", cases, columns, f"Perplexity of {Path(name).name} on {path.name}", "dtype")


@torch.inference_mode()
def _judged(model: PreTrainedModel, texts: list[Recording]) -> tuple[float, torch.Tensor]:
    """Return the perplexity of all responses, and the likeliest token at each of their places."""
    losses, likeliest = [], []
    for prompt, response in texts:
        ids = torch.tensor([[*prompt.tolist(), *response.tolist()]])
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
        losses.append(torch.nn.functional.cross_entropy(logits, ids[0, len(prompt) :], reduction="none"))
        likeliest.append(logits.argmax(-1))
    return math.exp(float(torch.cat(losses).double().mean())), torch.cat(likeliest)
