"""
The model of a bench: that of `--model`; without it, SmolLM2-135M-Instruct where it is in the user's cache (`make setup`
puts it there), else the embedded target, cost-matched.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_smartspec.commands.common.arguments import UsageError
from hf_smartspec.commands.common.models import demo_folder, load_tokenizer
from hf_smartspec.commands.common.names import WITH_DRAFT_MODEL, is_model, parts_of
from hf_smartspec.commands.common.real_model import NAME, real_model
from hf_smartspec.commands.common.setup import Setup, check_sources, load_setup, missing_arguments


def choose_model(args: argparse.Namespace, sources: Iterable[str] = ()) -> None:
    """
    Fill in `args.model` where the user leaves the choice.

    The embedded target stays the default where an argument belongs to it: a number of parameters, a draft model, or
    sources with one, since only the embedded target has a draft model beside it. Heads belong to the target that their
    files name.

    Args:
        sources (iterable of `str`): Names of the sources that will draft.
    """
    needs_embedded = any(name in WITH_DRAFT_MODEL or not _suits_real_model(name) for name in sources)
    others = (getattr(args, name, None) for name in ("model", "draft", "parameters"))
    if not needs_embedded and all(value is None for value in others):
        args.model = real_model()


def _suits_real_model(name: str) -> bool:
    """Return whether all models of a source are heads of the real model, by their configs."""
    folders = [Path(item) for item in parts_of(name) if is_model(item)]
    configs = [folder / "config.json" for folder in folders]
    bases = [
        json.loads(path.read_text()).get("base_model_name_or_path", "") if path.is_file() else "" for path in configs
    ]
    return all(Path(base).name == NAME for base in bases)


def new_setup(args: argparse.Namespace, sources: Iterable[str], option: str) -> Setup:
    """
    Return the model of the arguments, with its prompts and its draft model.

    Args:
        sources (iterable of `str`): Names of the sources that will draft.
        option (`str`): The command's option that names them, for errors.

    Raises:
        UsageError: If something cannot be loaded, or a source needs a draft model and there is none.
    """
    names = list(sources)
    choose_model(args, names)
    setup = load_setup(args)
    check_sources(names, setup, option)
    return setup


def described(args: argparse.Namespace, model: PreTrainedModel) -> str:
    """Return the model's name and size, for the first line of the output."""
    name = "the embedded target" if args.model is None else Path(args.model).name
    cost = ", cost-matched" if args.model is None and getattr(args, "parameters", None) != 0 else ""
    return f"{name}{cost}, {model.num_parameters() / 1e6:.0f} M parameters"


def tokenizer_of(args: argparse.Namespace) -> PreTrainedTokenizerBase:
    """
    Return the tokenizer of a bench that needs no more than that of its model.

    Raises:
        UsageError: If there is none.
    """
    name = args.model or str(demo_folder(*missing_arguments(args)) / "models" / "target")
    tokenizer = load_tokenizer(name)
    if tokenizer is None:
        raise UsageError(f"--model: cannot load a tokenizer from {name!r}")
    return tokenizer


def files_of(args: argparse.Namespace) -> list[Path]:
    """Return the files with prompts: those that are named, else the embedded one."""
    return args.files or [demo_folder(*missing_arguments(args)) / "prompts.jsonl"]
