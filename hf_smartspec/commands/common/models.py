"""Models, tokenizers and prompts that a command line names; errors are one line."""

import argparse
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ...candidates.heads.kinds import kind_of
from ...cpu.quantized import quantize
from ...prepare.draft_models import check_draft_model, load_whole
from .arguments import UsageError, usage_errors
from .outputs import opened, read_rows

_GGUF = ".gguf"
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "tekken.json")

# Neutral, of different lengths, and partly repetitive, so that prompt lookup finds something.
PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a small village by the sea, and in the village by the sea there lived a fisherman who",
    "Q: What is 12 + 30?\nA: 42\nQ: What is 15 + 20?\nA: 35\nQ: What is 11 + 23?\nA:",
    "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n\n\ndef multiply(a, b):\n",
    "Water boils at",
    "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, Monday, Tuesday, Wednesday,",
    "SELECT name, age FROM people WHERE age > 30;\n-- the same for cities\nSELECT name, size FROM cities WHERE",
    "List three reasons why trees are useful to people.",
)


def check_device(name: str) -> None:
    with usage_errors(f"cannot use the device {name!r}", RuntimeError, AssertionError, reason=_first_line):
        torch.zeros(1, device=name).item()


def default_device() -> str:
    """Return the name of the device that is used where none is named."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def use_machine(args: argparse.Namespace) -> None:
    """
    Set the threads of `add_machine_arguments`, and check its device or fill in the default; raises `UsageError` for a
    device that cannot be used.
    """
    if args.threads:
        torch.set_num_threads(args.threads)
    args.device = args.device or default_device()
    check_device(args.device)


def name_of(dtype: torch.dtype) -> str:
    """Return a dtype's name as `--dtype` takes it."""
    return str(dtype).removeprefix("torch.")


def load_model(
    name: str, dtype: str = "float32", device: str = "cpu", trust_remote_code: bool = False, is_draft: bool = False
) -> PreTrainedModel:
    """
    Return a causal or sequence-to-sequence language model from a folder, a .gguf file or the hub, in evaluation mode.

    Args:
        dtype (`str`): One of `DTYPES`, or "auto": that of its files.
        trust_remote_code (`bool`): Whether Python code among its files is run.
        is_draft (`bool`): Whether files that lack weights are refused.
    """
    check_folder(name)
    options: dict[str, Any] = {"trust_remote_code": True} if trust_remote_code else {}
    # Errors of many kinds; all mean that the model cannot be loaded.
    with usage_errors(f"cannot load the model {name!r}", Exception, reason=_first_line):
        name, options = _place_of(name, options)
        config = AutoConfig.from_pretrained(name, **options)
        if "gguf_file" in options:  # plain linear maps, whatever kernels are installed
            options["quantization_config"] = GgufConfig(dequantize=True)
        factory = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        kind = dtype if dtype == "auto" else getattr(torch, dtype)
        load = partial(load_whole, factory) if is_draft else factory.from_pretrained
        model: PreTrainedModel = load(name, dtype=kind, **options)
    model.to(torch.device(device))  # type: ignore[arg-type]  # the annotation of a decorator hides `self`
    return model.eval()


def dtype_to_load(name: str, dtype: str, quantization: str | None) -> str:
    """
    Return the dtype in which a model is loaded that `use_quantized` changes: weights of .gguf files, which may have
    four bits already, are not rounded before they are in int4.
    """
    return "float32" if quantization == "int4" and name.endswith(_GGUF) else dtype


def use_quantized(model: PreTrainedModel, quantization: str | None, dtype: str) -> None:
    """
    Quantize the model, if `--quantize` was given, with all else in `dtype`; raises `UsageError` for a model that cannot
    be quantized.
    """
    if quantization:
        with usage_errors("--quantize"):
            quantize(model, quantization, None if dtype == "auto" else getattr(torch, dtype))


def load_draft(name: str, target: PreTrainedModel, dtype: str = "float32") -> PreTrainedModel:
    """Return a draft model on the target's device; raises `UsageError` if it cannot draft for the target."""
    with usage_errors():
        kind = kind_of(name)
    if kind is not None:  # transformers would load it as a model with random weights
        raise UsageError(f"{name!r} holds a learned drafter, {kind.drafter.__name__}, and no draft model")
    draft = load_model(name, dtype, str(target.device), is_draft=True)
    with usage_errors():
        check_draft_model(draft, target)
    return draft


def load_tokenizer(name: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase | None:
    """Return the model's tokenizer, or None."""
    folder = Path(name)
    if folder.is_dir() and not any(next(folder.glob(pattern), None) for pattern in _TOKENIZER_FILES):
        return None  # transformers would make up an empty one from the model's type
    try:
        name, options = _place_of(name, {"trust_remote_code": trust_remote_code})
        return AutoTokenizer.from_pretrained(name, **options)
    except Exception:  # transformers raises many kinds for a missing or unreadable tokenizer
        return None


def check_folder(name: str) -> None:
    """Raise `UsageError` for the name of a folder or .gguf file that does not exist or holds no model."""
    if Path(name).is_file() and name.endswith(_GGUF):
        if find_spec("gguf") is None:
            raise UsageError(f'{name!r} is read by a package that is not installed: pip install "hf-smartspec[gguf]"')
        return
    looks_local = name.startswith((".", "/", "~", "\\")) or name.count("/") > 1 or not name
    if Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            raise UsageError(f"the folder {name!r} holds no model: it has no config.json")
    elif looks_local or Path(name).exists():
        raise UsageError(f"no such model folder: {name!r}")


def _place_of(name: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return name and options of `from_pretrained` for a folder, hub id or .gguf file."""
    path = Path(name)
    is_gguf = name.endswith(_GGUF) and path.is_file()
    return (str(path.parent), options | {"gguf_file": path.name}) if is_gguf else (name, options)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def read_prompts(path: str | Path) -> list[dict[str, Any]]:
    """Return the rows of a .jsonl file, which have a "prompt", or the lines of any other text file as such rows."""
    path = Path(path)
    if path.suffix == ".jsonl":
        rows = list(read_rows(path))
    else:
        with opened(path) as file:
            lines = file.read().splitlines()
        rows = [(number, {"prompt": line}) for number, line in enumerate(lines, start=1) if line.strip()]
    if not rows:
        raise UsageError(f"{str(path)!r} holds no prompts")
    for number, row in rows:
        if not isinstance(row.get("prompt"), str):
            raise UsageError(f'{str(path)!r}, row {number} has no text under "prompt"')
    return [row for _, row in rows]


def encode(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, max_len: int) -> list[list[int]]:
    """Return the last `max_len` token ids of each prompt, a user's turn where there is a chat template."""
    rows = []
    for text in texts:
        if tokenizer.chat_template:
            turn = [{"role": "user", "content": text}]
            rendered = str(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))
            ids = tokenizer(rendered, add_special_tokens=False, verbose=False).input_ids
        else:
            ids = tokenizer(text, verbose=False).input_ids
        rows.append(ids[-max_len:])
    return [row for row in rows if row]


def random_prompts(num_prompts: int, vocab_size: int, max_len: int, seed: int) -> list[list[int]]:
    """Return rows of random token ids, each with a repeated phrase, for models without a tokenizer."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(num_prompts):
        phrase = rng.integers(0, vocab_size, rng.integers(3, 7)).tolist()
        middle = rng.integers(0, vocab_size, rng.integers(1, 12)).tolist()
        rows.append((phrase + middle + phrase + phrase[:2])[-max_len:])
    return rows


def left_padded(
    prompts: Sequence[Sequence[int] | np.ndarray], pad_id: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return `input_ids` and `attention_mask` of shape `[rows, longest]`, for `generate`."""
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), pad_id)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


_DEMOS = Path("demos")
_PARTS = ("models/target/tokenizer.json", "models/target/config.json", "models/draft/config.json", "prompts.jsonl")


def find_demo() -> Path | None:
    """Return the folder with the demo's models and prompts, in the working folder or the repository, or None."""
    for folder in (_DEMOS, Path(__file__).parents[3] / _DEMOS):
        if all((folder / part).is_file() for part in _PARTS):
            return folder
    return None


def demo_folder(*needed: str) -> Path:
    """
    Return the folder of `find_demo`, which replaces arguments that were not given.

    Args:
        needed (`str`): These arguments; none, where no argument could name other files.

    Raises:
        UsageError: if there is no such folder; the message names the arguments to give.
    """
    folder = find_demo()
    if folder is None:
        missing = " and ".join(needed)
        remedy = f"name {missing}, or call this" if needed else "call this"
        raise UsageError(
            f"the demo's models and prompts come with the repository, not the package: {remedy} in a checkout"
        )
    return folder
