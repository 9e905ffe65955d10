"""What the benches of load have in common: the target with its prompts, and what may draft for it."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ...candidates import DraftModelCandidates, TreeCandidateGenerator
from ...goodput import LengthPolicy
from ...prepare.config import SmartSpecConfig
from ...serving.engine import Engine
from ..replay.plots import check_matplotlib
from ..verify.command import not_negative, positive
from .cost_matched import enlarge
from .data_sets import DataSet, answered, remember
from .models import (
    DTYPES,
    UsageError,
    check_device,
    check_output,
    load_draft,
    load_model,
    load_tokenizer,
)
from .recordings import Fields, Recording, default_tokenizer, read_requests
from .replaying import ReplayEngine
from .runs import eos_ids
from .sources import WITH_DRAFT_MODEL, new_source

_PARAMETERS = 200e6

Drafts = dict[bytes, tuple[np.ndarray, np.ndarray]]  # by text: `ranks` and `probs` of a `LoadRequest`


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
        help=".jsonl or .jsonl.gz with prompts and responses; one is one data set (default: the demo's)",
    )  # fmt: skip
    add_target_arguments(parser)
    parser.add_argument("--draft", metavar="MODEL", help="draft model (default: the demo's for the demo's target)")
    parser.add_argument(
        "--limit", type=positive, default=64, metavar="N", help="different prompts per FILE (default: %(default)s)"
    )
    parser.add_argument(
        "--max-prompt", type=positive, default=256, metavar="N", help="tokens of a prompt, its end (default: 256)"
    )
    parser.add_argument("--max-new-tokens", type=positive, default=48, metavar="N", help="default: %(default)s")
    parser.add_argument("--max-batch-size", type=positive, default=16, metavar="N", help="default: 16")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and of the order of prompts (default: 0)")
    add_output_arguments(parser)


def add_text_arguments(parser: argparse.ArgumentParser) -> None:
    """What the target answers, and what has been answered before."""
    parser.add_argument(
        "--replay", action="store_true",
        help="the target runs at its cost, but picks the recorded responses, so that drafts meet real text",
    )  # fmt: skip
    parser.add_argument(
        "--remember", type=not_negative, default=0, metavar="N",
        help="the first N requests of every FILE are not asked: suffix trees know them and their responses already, as "
        "those of a service do that has been running for a while (default: 0)",
    )  # fmt: skip


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
        max_new_tokens, max_batch_size, seed (`int`): As the command's arguments.
        name (`str`): Of the data set.
        responses (list of `np.ndarray` of shape `[n]`, int64, *optional*): What the target answers to the prompts, as
            far as that is known.
        replays (`bool`): Whether the responses are recorded ones, which the target is made to pick.
        past (list of `Recording`): Earlier requests, which suffix trees remember.
        drafts (`dict`): By text, what the draft model proposes for it, once that has been asked for.
    """

    model: PreTrainedModel
    draft: PreTrainedModel | None
    prompts: list[np.ndarray]
    max_new_tokens: int
    max_batch_size: int
    seed: int
    name: str = ""
    responses: list[np.ndarray] | None = None
    replays: bool = False
    past: list[Recording] = field(default_factory=list)
    drafts: Drafts = field(default_factory=dict)

    @property
    def end_id(self) -> int:
        """The end-of-sequence token; one that is no token where there is none."""
        return next(iter(eos_ids(self.model)), -1)

    def new_source(self, name: str, drafter: TreeCandidateGenerator | None = None) -> TreeCandidateGenerator:
        """
        A source that has learnt nothing yet but what is remembered.

        Args:
            drafter (`TreeCandidateGenerator`, *optional*): Takes the draft model's place.
        """
        if drafter is None and name in WITH_DRAFT_MODEL:
            assert self.draft is not None, "asked for where there is a draft only"
            drafter = DraftModelCandidates(self.draft)
        source = new_source(name, self.model, drafter, self.wrong_token)
        remember(source, self.past)
        return source

    @property
    def wrong_token(self) -> int:
        """The last token that is in none of the texts, as far as these are known; else the rarest."""
        vocab_size = self.model.config.get_text_config(decoder=True).vocab_size
        ends = [np.array(eos_ids(self.model), np.int64)]
        counts = np.bincount(np.concatenate([*self.prompts, *(self.responses or ()), *ends]), minlength=vocab_size)
        return int(vocab_size - 1 - counts[vocab_size - 1 :: -1].argmin())

    def new_engine(self, source: TreeCandidateGenerator, policy: LengthPolicy | None) -> Engine:
        config = SmartSpecConfig(source, policy=policy)
        if not self.replays:
            return Engine(self.model, config, max_batch_size=self.max_batch_size)
        assert self.responses is not None, "they are recorded"
        return ReplayEngine(self.model, config, self.max_batch_size, self.prompts, self.responses, self.end_id)

    def shuffled(self) -> "Setup":
        """The same with its prompts in random order, by the seed."""
        order = np.random.default_rng(self.seed).permutation(len(self.prompts)).tolist()
        responses = self.responses
        return replace(
            self,
            prompts=[self.prompts[index] for index in order],
            responses=None if responses is None else [responses[index] for index in order],
        )

    def sample(self, num_prompts: int) -> "Setup":
        """The same with some of the prompts, from all parts of the data set."""
        part = slice(0, None, -(-len(self.prompts) // num_prompts))
        return replace(
            self, prompts=self.prompts[part], responses=None if self.responses is None else self.responses[part]
        )


def load_setups(args: argparse.Namespace) -> list[Setup]:
    """
    One for every file.

    Raises:
        UsageError: for models, files or prompts that cannot be used.
    """
    model, tokenizer = load_target(args)
    check_replay(args, model)
    draft_name = args.draft or (None if args.model else str(demo_folder() / "models" / "draft"))
    draft = load_draft(draft_name, model, args.dtype) if draft_name else None
    setups = []
    for path in args.files or [demo_folder() / "prompts.jsonl"]:
        texts = read_requests(path, Fields(), None)
        sizes = (max_prompt_len(args, model), args.max_new_tokens)
        data = DataSet.of(str(path), texts, tokenizer, args.limit, args.remember, *sizes)
        past = list(data.past) if args.replay else answered(data.past, model, args.max_batch_size, args.max_new_tokens)
        setups.append(
            Setup(
                model, draft, [np.array(prompt, np.int64) for prompt in data.prompts], args.max_new_tokens,
                args.max_batch_size, args.seed, data.name, data.responses if args.replay else None, args.replay, past,
            )
        )  # fmt: skip
    return setups


def load_setup(args: argparse.Namespace) -> Setup:
    """`load_setups` as one."""
    return merged(load_setups(args))


def merged(setups: Sequence[Setup]) -> Setup:
    """All data sets as one; of equal prompts, the first counts."""
    prompts = [prompt for setup in setups for prompt in setup.prompts]
    responses = [response for setup in setups for response in setup.responses or ()]
    first = {prompt.tobytes(): place for place, prompt in reversed(list(enumerate(prompts)))}
    places = sorted(first.values())
    return replace(
        setups[0],
        name=", ".join(setup.name for setup in setups),
        prompts=[prompts[place] for place in places],
        responses=[responses[place] for place in places] if responses else None,
        past=[item for setup in setups for item in setup.past],
    )


def check_replay(args: argparse.Namespace, model: PreTrainedModel) -> None:
    if args.replay and not eos_ids(model):
        name = args.model or "the demo's target"
        raise UsageError(f"--replay: {name!r} has no end-of-sequence token to end responses with")


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


def max_prompt_len(args: argparse.Namespace, model: PreTrainedModel) -> int:
    """Tokens of a prompt that leave room for the new ones."""
    positions = getattr(model.config, "max_position_embeddings", None) or 2**31
    max_len: int = min(args.max_prompt, positions - args.max_new_tokens)
    if max_len < 1:
        raise UsageError(f"--max-new-tokens: {args.max_new_tokens} leave no room for a prompt in this model")
    return max_len


def check_sources(args: argparse.Namespace, setup: Setup) -> None:
    """Sources that draft with a model need one."""
    missing = [name for name in args.sources if name in WITH_DRAFT_MODEL]
    if missing and setup.draft is None:
        raise UsageError(f"--sources: {missing[0]} needs --draft, a draft model")


def command_of(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments as JSON knows them."""
    return {
        key: str(value) if isinstance(value, Path) else [str(item) for item in value] if key == "files" else value
        for key, value in vars(args).items()
    }
