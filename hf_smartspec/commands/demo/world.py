"""The models and prompts of the page."""

import argparse
import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...candidates import SuffixTreeCandidates, TreeCandidateGenerator
from ...candidates.base import NoCandidates
from ...target_model.written import written_decoder
from ..common.arguments import AUTO, UsageError
from ..common.console import environment
from ..common.drafters import DrafterFiles
from ..common.models import (
    check_device,
    check_folder,
    default_device,
    demo_folder,
    encode,
    find_demo,
    name_of,
    read_prompts,
)
from ..common.names import JOINT, is_model, parts_of, shown
from ..common.real_model import real_model
from ..common.setup import load_target, num_parameters

LOOKUP, NONE = "prompt_lookup", "none"
_EMBEDDED = ("draft", "medusa", "eagle3")
_REAL = ("smollm2-eagle3",)  # drafters of the real model
_CATEGORIES = "category"


class RefusedError(Exception):
    """Error of the settings on the page, whose message the page shows."""


@dataclass
class World:
    """The target with its drafters and prompts."""

    model: PreTrainedModel  # the target of races and loads
    small: PreTrainedModel  # the target as it was trained, before it was enlarged
    tokenizer: PreTrainedTokenizerBase
    drafters: DrafterFiles
    names: dict[str, str]  # sources to choose among: by name on the page, the name in `DrafterFiles`
    prompts: dict[str, list[str]]
    # The embedded models, of which one learns, where the model has no draft model of its own.
    learner: "World | None" = None
    # The one thread that computes: two at once would disturb one another's times.
    worker: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "smartspec demo"))
    _remembering: dict[str, TreeCandidateGenerator] = field(default_factory=dict)

    @property
    def is_enlarged(self) -> bool:
        return self.model is not self.small

    def new_source(self, name: str, remembers: bool = False) -> TreeCandidateGenerator:
        """Return a new source of one of `names`, or with `remembers` the one that has drafted for earlier answers."""
        if remembers:
            if name not in self._remembering:
                self._remembering[name] = self.new_source(name)
            return self._remembering[name]
        if name == NONE:
            return NoCandidates()
        return SuffixTreeCandidates() if name == AUTO else self.drafters.new_source(self.names[name])

    def draft_models(self) -> list[str]:
        """Return those of `names` that are draft models: only these can learn on the page."""
        single = [name for name, value in self.names.items() if name not in (AUTO, LOOKUP, NONE) and JOINT not in value]
        return [name for name in single if isinstance(self.drafters.loaded(self.names[name]), PreTrainedModel)]

    def new_draft(self, name: str, is_random: bool, seed: int = 0) -> PreTrainedModel:
        """Return a copy of a draft model, which may learn: with its trained weights, or with random ones."""
        draft: Any = self.drafters.loaded(self.names[name])
        if not is_random:
            return copy.deepcopy(draft)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            new: Any = type(draft)(copy.deepcopy(draft.config))
        learner: PreTrainedModel = new.to(device=draft.device, dtype=draft.dtype).eval()
        return learner

    def encode(self, prompt: str, max_new_tokens: int) -> list[int]:
        """
        Return the token ids of a prompt; raises `RefusedError` for a prompt that is empty, or leaves no room for the
        answer.
        """
        if not prompt.strip():
            raise RefusedError("There is no prompt yet: write one, or choose an example.")
        (ids,) = encode([prompt], self.tokenizer, 2**31)
        room = self._positions - max_new_tokens
        if len(ids) > room:
            raise RefusedError(
                f"The prompt has {len(ids):,} tokens, and with {max_new_tokens} new ones the model has room for "
                f"{max(room, 0):,}: shorten the prompt or the answer."
            )
        return ids

    def encoded(self, categories: Sequence[str], max_new_tokens: int) -> list[np.ndarray]:
        """Return the token ids of the prompts of some categories, in turns; raises `RefusedError` if there are none."""
        columns = [self.prompts[name] for name in categories if name in self.prompts]
        longest = max(map(len, columns), default=0)
        texts = [column[place] for place in range(longest) for column in columns if place < len(column)]
        room = max(min(256, self._positions - max_new_tokens), 1)
        if not texts:
            raise RefusedError("No prompts are chosen: tick at least one kind.")
        return [np.array(ids, np.int64) for ids in encode(texts, self.tokenizer, room)]

    @property
    def _positions(self) -> int:
        return getattr(self.model.config, "max_position_embeddings", None) or 2**31

    def describe(self) -> str:
        """Return one line about model and machine."""
        system = environment(self.model.device, self.model.dtype)
        name = Path(self.small.name_or_path or "").name or type(self.small).__name__
        size = f"{_millions(self.model)} parameters"
        if self.is_enlarged:
            size = (
                f"{_millions(self.small)} parameters at the cost of {_millions(self.model)} (cost-matched: "
                "padded with weights that change the cost and not the output, since a model this small gains little)"
            )
        threads = f"{system['threads']} threads, " if self.model.device.type == "cpu" else ""
        return f"{name}: {size}. {system['dtype']}, {threads}{system['device']}"

    @property
    def dtype(self) -> str:
        return name_of(self.model.dtype)

    @property
    def is_exact(self) -> bool:
        """Return whether texts must be those of transformers' own `generate`, to the last token."""
        return self.model.dtype == torch.float32

    @property
    def is_reproducible(self) -> bool:
        """Return whether texts must be those of this library without drafts, to the last token."""
        decoder = written_decoder(self.model)
        return self.is_exact or (decoder is not None and decoder.is_reproducible)


def _millions(model: PreTrainedModel) -> str:
    return f"{model.num_parameters() / 1e6:.0f} M"


def default_dtype(device: str) -> str:
    """Return bfloat16 where the machine multiplies in it; elsewhere, float32 is faster."""
    kind = torch.device(device).type
    if kind == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float32"
    is_fast = (
        getattr(torch.cpu, "_is_avx512_bf16_supported", bool)() or getattr(torch.cpu, "_is_amx_tile_supported", bool)()
    )
    return "bfloat16" if kind != "cpu" or is_fast else "float32"


def load_world(args: argparse.Namespace) -> World:
    """
    Load the models and prompts of a command line. Without one, the target is SmolLM2-135M-Instruct where it is in the
    user's cache; the embedded target serves elsewhere, and where a size or a draft model is named.

    Raises:
        UsageError: If models, files or a device cannot be used.
    """
    args.device = args.device or default_device()
    check_device(args.device)
    given = args.model
    if given is args.draft is args.parameters is None:
        args.model = real_model()
    if args.dtype == AUTO and not given:
        args.dtype = default_dtype(args.device)
    file = "real_prompts.jsonl" if args.model else "prompts.jsonl"
    prompts = _prompts(args.prompts or demo_folder("--prompts") / file)
    for path in args.draft or ():
        for item in filter(is_model, parts_of(path)):
            check_folder(item)
    model, tokenizer = load_target(args)
    small = load_target(argparse.Namespace(**vars(args) | {"parameters": 0}))[0] if num_parameters(args) else model
    folder, own = (find_demo(), _REAL) if args.model else (demo_folder("--model"), _EMBEDDED)
    is_default = args.model is None or args.model is not given  # a model that the user names has drafters of its own
    paths = args.draft or ([str(folder / "models" / name) for name in own] if folder and is_default else [])
    drafters = DrafterFiles(small, model if small is not model else None, "--draft")
    world = World(model, small, tokenizer, drafters, _names(paths, drafters), prompts)
    if args.model is not given and find_demo() is not None:
        embedded = argparse.Namespace(**vars(args) | {"model": None, "parameters": 0})
        world.learner = replace(load_world(embedded), worker=world.worker)
    return world


def _names(paths: Sequence[str], drafters: DrafterFiles) -> dict[str, str]:
    names = {AUTO: "suffix", LOOKUP: LOOKUP}
    for path in paths:
        drafters.named(path)  # refuses what does not fit
        if shown(path) in names:
            raise UsageError(f"--draft: two are shown as {shown(path)!r}; rename a folder")
        names[shown(path)] = path
    joint = next((path for path in paths if isinstance(drafters.loaded(path), PreTrainedModel)), None)
    if joint is not None and JOINT not in joint:
        names[f"suffix {JOINT} {shown(joint)}"] = f"suffix{JOINT}{joint}"
    return names | {NONE: NONE}


def _prompts(path: str | Path) -> dict[str, list[str]]:
    prompts: dict[str, list[str]] = {}
    for row in read_prompts(path):
        prompts.setdefault(str(row.get(_CATEGORIES, "prompts")), []).append(row["prompt"])
    return prompts
