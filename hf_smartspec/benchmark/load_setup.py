"""What the benches of load have in common: the target with its prompts, what may draft for it, and the policies."""

import argparse
import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..candidates import DraftModelCandidates, PromptLookupCandidates, SuffixTreeCandidates, TreeCandidateGenerator
from ..goodput import CostModel, FixedLength, GoodputAuction, LengthPolicy, NoSpeculation
from ..goodput.policies import BatchLookupTable, RequestGoodput, StepGoodput
from .cost_matched import enlarge
from .loading import (
    DTYPES,
    UsageError,
    check_device,
    check_output,
    encode,
    load_draft,
    load_model,
    load_tokenizer,
)
from .replay_data import Fields, default_tokenizer, read_requests
from .replay_plots import check_matplotlib
from .runs import eos_ids
from .verify import positive

SOURCES = ("draft", "prompt_lookup", "suffix")
NONE = "none"
_PARAMETERS = 200e6


def positive_number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if not (0 < value < float("inf")):
        raise argparse.ArgumentTypeError(f"must be positive, got {text}")
    return value


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Target, draft, prompts and outputs, the same for all benches of the engine."""
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="FILE",
        help=".jsonl or .jsonl.gz with prompts and responses, of which the prompts are used (default: the demo's)",
    )  # fmt: skip
    add_target_arguments(parser)
    parser.add_argument("--draft", metavar="MODEL", help="draft model (default: the demo's for the demo's target)")
    parser.add_argument("--limit", type=positive, default=64, metavar="N", help="different prompts (default: 64)")
    parser.add_argument(
        "--max-prompt", type=positive, default=256, metavar="N", help="tokens of a prompt, its end (default: 256)"
    )
    parser.add_argument("--max-new-tokens", type=positive, default=48, metavar="N", help="default: 48")
    parser.add_argument("--max-batch-size", type=positive, default=16, metavar="N", help="default: 16")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and of the order of prompts (default: 0)")
    add_output_arguments(parser)


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="MODEL", help="target: folder or hub id (default: the demo's)")
    parser.add_argument(
        "--parameters", type=float, metavar="N",
        help="enlarge the target to about N parameters without a change of its output, so that real text meets real "
        f"cost; 0 leaves it as it is (default: {_PARAMETERS:.0e} for the demo's target, 0 for others)",
    )  # fmt: skip
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default: bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--threads", type=positive, metavar="N", help="CPU threads (default: torch's choice)")


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw them, for example into a .png file")


def check_outputs(args: argparse.Namespace) -> None:
    """What cannot be written is refused before any work."""
    check_output(args.json)
    check_output(args.plot)
    if args.plot:
        check_matplotlib(args.plot)


@dataclass
class Setup:
    """
    Args:
        model (`PreTrainedModel`): The target.
        draft (`PreTrainedModel`, *optional*): Drafts for it.
        prompts (list of `np.ndarray` of shape `[prompt_len]`, int64): Different requests.
    """

    model: PreTrainedModel
    draft: PreTrainedModel | None
    prompts: list[np.ndarray]
    max_new_tokens: int
    max_batch_size: int
    seed: int

    @property
    def end_id(self) -> int:
        """The end-of-sequence token; one that is no token where there is none."""
        return next(iter(eos_ids(self.model)), -1)

    def new_source(self, name: str) -> TreeCandidateGenerator:
        """A source that has learnt nothing yet."""
        if name == "draft":
            assert self.draft is not None, "asked for where there is a draft only"
            return DraftModelCandidates(self.draft)
        return PromptLookupCandidates() if name == "prompt_lookup" else SuffixTreeCandidates()


def load_setup(args: argparse.Namespace) -> Setup:
    """
    Raises:
        UsageError: for models, files or prompts that cannot be used.
    """
    model, tokenizer = load_target(args)
    draft_name = args.draft or (None if args.model else str(demo_folder() / "models" / "draft"))
    draft = load_draft(draft_name, model, args.dtype) if draft_name else None
    prompts = _prompts(args, model, tokenizer)
    return Setup(model, draft, prompts, args.max_new_tokens, args.max_batch_size, args.seed)


def demo_folder() -> Path:
    """With the demo's prompts and models."""
    tokenizer = default_tokenizer()
    if tokenizer is None:
        raise UsageError("name FILE and --model: the demo's are not here")
    return Path(tokenizer).parents[1]


def load_target(args: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """
    The model that `add_target_arguments` names, greedy, with its tokenizer.

    Raises:
        UsageError: for a device or a model that cannot be used.
    """
    if args.threads:
        torch.set_num_threads(args.threads)
    check_device(args.device)
    name = args.model or str(demo_folder() / "models" / "target")
    model = load_model(name, args.dtype, args.device)
    tokenizer = load_tokenizer(name)
    if tokenizer is None:
        raise UsageError(f"--model: {name!r} has no tokenizer")
    num_parameters = (0 if args.model else _PARAMETERS) if args.parameters is None else args.parameters
    if num_parameters:
        try:
            model = enlarge(model, num_parameters)
        except ValueError as error:
            raise UsageError(f"--parameters: {error}") from error
    ids, pad_id = eos_ids(model), model.generation_config.pad_token_id
    # Greedy and nothing else, whatever the model samples or penalises by default.
    model.generation_config = GenerationConfig(
        eos_token_id=ids or None, pad_token_id=pad_id if pad_id is not None else ids[0] if ids else 0
    )
    return model, tokenizer


def _prompts(args: argparse.Namespace, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[np.ndarray]:
    files = args.files or [demo_folder() / "prompts.jsonl"]
    share = -(-args.limit // len(files))
    texts = ["\n".join(item.context) for path in files for item in read_requests(path, Fields(turns="none"), share)]
    max_len = max_prompt_len(args, model)
    prompts = [np.array(ids, np.int64) for ids in encode(list(dict.fromkeys(texts)), tokenizer, max_len)]
    if not prompts:
        raise UsageError("the tokenizer makes no tokens of the prompts")
    return prompts[: args.limit]


def max_prompt_len(args: argparse.Namespace, model: PreTrainedModel) -> int:
    """Tokens of a prompt that leave room for the new ones."""
    positions = getattr(model.config, "max_position_embeddings", None) or 2**31
    max_len: int = min(args.max_prompt, positions - args.max_new_tokens)
    if max_len < 1:
        raise UsageError(f"--max-new-tokens: {args.max_new_tokens} leave no room for a prompt in this model")
    return max_len


# Policies


@dataclass
class Policies:
    """
    Makes length policies by name: "none", "k=3", "table", "step", "request", "auction".

    Args:
        cost (`CostModel`): What is known of the target's; every policy gets a copy to correct.
        table (`BatchLookupTable`, *optional*): For "table".
    """

    cost: CostModel
    table: BatchLookupTable | None = None

    def new(self, name: str) -> LengthPolicy:
        if name == NONE:
            return NoSpeculation()
        if name.startswith("k="):
            return FixedLength(int(name[2:]))
        if name == "table":
            assert self.table is not None, "the table is made before it is asked for"
            return BatchLookupTable(self.table.lengths)
        kinds: dict[str, Callable[[CostModel], LengthPolicy]] = {
            "step": StepGoodput, "request": RequestGoodput, "auction": GoodputAuction,
        }  # fmt: skip
        return kinds[name](copy.deepcopy(self.cost))


def policy_name(text: str) -> str:
    """A name that `Policies` knows, for argparse."""
    if text in (NONE, "table", "step", "request", "auction") or (text.startswith("k=") and text[2:].isdecimal()):
        return text
    raise argparse.ArgumentTypeError(f"must be none, k=NUMBER, table, step, request or auction, got {text!r}")


def is_fixed(name: str) -> bool:
    """Whether the policy never changes its mind."""
    return name == NONE or name.startswith("k=")


def check_sources(args: argparse.Namespace, setup: Setup) -> None:
    if "draft" in args.sources and setup.draft is None:
        raise UsageError("--sources: draft needs --draft, a draft model")


def command_of(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments as JSON knows them."""
    return {
        key: str(value) if isinstance(value, Path) else [str(item) for item in value] if key == "files" else value
        for key, value in vars(args).items()
    }
