"""Setup of benches: the target, its prompts and its draft sources."""

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ...candidates import DraftModelCandidates, TreeCandidateGenerator
from ...goodput import LengthPolicy
from ...prepare.config import SmartSpecConfig
from ...serving.engine import Engine
from .arguments import PARAMETERS, UsageError, usage_errors
from .cost_matched import enlarge
from .drafters import DrafterFiles, new_source
from .models import (
    demo_folder,
    dtype_to_load,
    load_draft,
    load_model,
    load_tokenizer,
    name_of,
    use_machine,
    use_quantized,
)
from .names import SOURCES, WITH_DRAFT_MODEL, check_distinct, shown
from .recordings import DataSet, Fields, Recording, answered, read_requests, remember
from .replaying import ReplayEngine
from .runs import eos_ids, pad_id

Drafts = dict[bytes, tuple[np.ndarray, np.ndarray]]  # by text: `ranks` and `probs` of a `LoadRequest`
NewSources = dict[str, Callable[[], TreeCandidateGenerator]]  # by the names that are shown


@dataclass
class Setup:
    """A target with one data set."""

    model: PreTrainedModel  # the target
    draft: PreTrainedModel | None  # its draft model
    prompts: list[np.ndarray]  # `[prompt_len]` int64: distinct requests
    max_new_tokens: int  # this and the next two are the command's arguments
    max_batch_size: int
    seed: int
    name: str = ""
    responses: list[np.ndarray] | None = None  # `[n]` int64: responses to the prompts, where known
    replays: bool = False  # whether the responses are recorded ones, which the target is made to pick
    past: list[Recording] = field(default_factory=list)  # earlier requests, which suffix trees remember
    # By text, the draft model's proposals for it, as far as they were computed.
    drafts: Drafts = field(default_factory=dict)
    # By name in tables, a function that makes a new source of a learned drafter.
    learned: NewSources = field(default_factory=dict)

    @property
    def end_id(self) -> int:
        """The end-of-sequence token; -1 where there is none."""
        return next(iter(eos_ids(self.model)), -1)

    def new_source(self, name: str, drafter: TreeCandidateGenerator | None = None) -> TreeCandidateGenerator:
        """Return a new source, whose suffix trees hold the past; `drafter` takes the place of the draft model."""
        if name in self.learned:
            source = self.learned[name]()
            remember(source, self.past)
            return source
        if drafter is None and name in WITH_DRAFT_MODEL:
            assert self.draft is not None, "asked for where there is a draft only"
            drafter = DraftModelCandidates(self.draft)
        source = new_source(name, self.model, drafter, self.wrong_token)
        remember(source, self.past)
        return source

    @property
    def wrong_token(self) -> int:
        """The last token that is in none of the known texts; if there is none, the rarest."""
        vocab_size = self.model.config.get_text_config(decoder=True).vocab_size
        ends = [np.array(eos_ids(self.model), np.int64)]
        counts = np.bincount(np.concatenate([*self.prompts, *(self.responses or ()), *ends]), minlength=vocab_size)
        return int(vocab_size - 1 - counts[vocab_size - 1 :: -1].argmin())

    def new_engine(self, source: TreeCandidateGenerator, policy: LengthPolicy | str | None) -> Engine:
        config = SmartSpecConfig(source, policy=policy)
        if not self.replays:
            return Engine(self.model, config, max_batch_size=self.max_batch_size)
        assert self.responses is not None, "they are recorded"
        return ReplayEngine(self.model, config, self.max_batch_size, self.prompts, self.responses, self.end_id)

    def shuffled(self) -> "Setup":
        """Return the setup with its prompts in random order, by the seed."""
        return self._with(np.random.default_rng(self.seed).permutation(len(self.prompts)).tolist())

    def sample(self, num_prompts: int) -> "Setup":
        """Return the setup with `num_prompts` of its prompts at most, evenly spread."""
        return self._with(range(0, len(self.prompts), -(-len(self.prompts) // num_prompts)))

    def _with(self, places: Sequence[int]) -> "Setup":
        responses = None if self.responses is None else [self.responses[place] for place in places]
        return replace(self, prompts=[self.prompts[place] for place in places], responses=responses)


def load_setups(args: argparse.Namespace) -> list[Setup]:
    """Return a setup for every file; raises `UsageError` for models, files or prompts that cannot be used."""
    files = args.files or [demo_folder(*missing_arguments(args)) / "prompts.jsonl"]
    model, tokenizer = load_target(args)
    check_replay(args, model)
    draft_name = args.draft or (None if args.model else str(demo_folder("--model") / "models" / "draft"))
    draft = load_draft(draft_name, model, args.dtype) if draft_name else None
    learned, setups = learned_sources(args, model), []
    for path in files:
        texts = read_requests(path, Fields(), None, needs_responses=args.replay)
        sizes = (max_prompt_len(args, model), args.max_new_tokens)
        data = DataSet.of(str(path), texts, tokenizer, args.limit, args.remember, *sizes)
        past = list(data.past) if args.replay else answered(data.past, model, args.max_new_tokens)
        setups.append(
            Setup(
                model, draft, [np.array(prompt, np.int64) for prompt in data.prompts], args.max_new_tokens,
                args.max_batch_size, args.seed, data.name, data.responses if args.replay else None, args.replay, past,
                learned=learned,
            )
        )  # fmt: skip
    return setups


def learned_sources(
    args: argparse.Namespace, model: PreTrainedModel
) -> dict[str, Callable[[], TreeCandidateGenerator]]:
    """Return functions that make new sources of the learned drafters among `args.sources`, by their names in tables."""
    names = [name for name in getattr(args, "sources", ()) if name not in SOURCES]
    if not names:
        return {}
    check_distinct(args.sources, "--sources")
    files = drafter_files(args, model, "--sources")
    for name in names:
        files.named(name)  # refuses what does not fit
    return {shown(name): partial(files.new_source, name) for name in names}


def drafter_files(args: argparse.Namespace, model: PreTrainedModel, option: str) -> DrafterFiles:
    """Return the files of drafters for `model`; learned ones are loaded for the target as it was before it grew."""
    if not num_parameters(args):
        return DrafterFiles(model, option=option)
    own = load_model(args.model or str(demo_folder("--model") / "models" / "target"), args.dtype, args.device)
    return DrafterFiles(own, model, option)


def load_setup(args: argparse.Namespace) -> Setup:
    """Return the setups of all files, merged into one."""
    return merged(load_setups(args))


def merged(setups: Sequence[Setup]) -> Setup:
    """Return one setup of all data sets; of equal prompts, the first is kept."""
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


def missing_arguments(args: argparse.Namespace) -> list[str]:
    """Return the arguments that were not given and are taken from the demo."""
    return [name for name, value in (("FILE", args.files), ("--model", args.model)) if not value]


def load_target(args: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """
    Load the model that `add_target_arguments` names, greedy, and its tokenizer; `args.dtype` becomes that of the model.
    Raises `UsageError` for a device or a model that cannot be used.
    """
    use_machine(args)
    name = args.model or str(demo_folder("--model") / "models" / "target")
    model = load_model(name, dtype_to_load(name, args.dtype, args.quantize), args.device)
    tokenizer = load_tokenizer(name)
    if tokenizer is None:
        raise UsageError(f"--model: {name!r} has no tokenizer")
    if num := num_parameters(args):
        with usage_errors("--parameters"):
            model = enlarge(model, num)
    use_quantized(model, args.quantize, args.dtype)
    args.dtype = name_of(model.dtype)
    # Greedy and nothing else, whatever the model samples or penalises by default.
    model.generation_config = GenerationConfig(
        eos_token_id=eos_ids(model) or None,
        pad_token_id=pad_id(model),
        decoder_start_token_id=model.generation_config.decoder_start_token_id,
    )
    return model, tokenizer


def num_parameters(args: argparse.Namespace) -> float:
    """Return the size to which the target is enlarged; 0 where it is not."""
    return (0 if args.model else PARAMETERS) if args.parameters is None else args.parameters


def max_prompt_len(args: argparse.Namespace, model: PreTrainedModel) -> int:
    """Return the longest length of a prompt that leaves room for the new tokens."""
    positions = getattr(model.config, "max_position_embeddings", None) or 2**31
    max_len: int = min(args.max_prompt, positions - args.max_new_tokens)
    if max_len < 1:
        raise UsageError(f"--max-new-tokens: {args.max_new_tokens} leave no room for a prompt in this model")
    return max_len


def check_sources(names: Iterable[str], setup: Setup, option: str) -> None:
    """Raise `UsageError`, naming the option, for sources that need a draft model where there is none."""
    missing = [name for name in names if name in WITH_DRAFT_MODEL]
    if missing and setup.draft is None:
        raise UsageError(f"{option}: {missing[0]} needs --draft, a draft model")
