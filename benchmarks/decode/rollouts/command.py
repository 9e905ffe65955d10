"""`benchmarks rollouts`: what speculation does for rollouts of GRPO by TRL, and whether it changes training."""

import argparse
from typing import Any

from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_smartspec.commands.common.arguments import UsageError, command_of
from hf_smartspec.commands.common.console import make_console
from hf_smartspec.commands.common.cost_matched import enlarge
from hf_smartspec.commands.common.demo import demo_folder
from hf_smartspec.commands.common.drafters import DrafterFiles
from hf_smartspec.commands.common.models import load_model, load_tokenizer, read_prompts
from hf_smartspec.commands.common.names import JOINT, shown
from hf_smartspec.commands.common.outputs import check_output, replace_json
from hf_smartspec.commands.common.progress import track
from hf_smartspec.commands.common.setup import missing_arguments, num_parameters
from hf_smartspec.commands.common.timing import environment
from hf_smartspec.online.distillation import OnlineDistillation
from hf_smartspec.prepare.config import SmartSpecConfig
from hf_smartspec.prepare.resolve import resolve

from ...kit.claims import exit_status
from .report import Summary, claims, print_report, summary
from .runs import PLAIN, Settings, check_libraries, train

_ONLINE = "online:"  # before a drafter's name
_DEMO_CATEGORY = "math"


def run(args: argparse.Namespace) -> int:
    check_output(args.json)
    check_libraries()
    if args.generations < 2:
        raise UsageError("--generations: GRPO compares completions of one prompt, 2 or more")
    if args.quantize:
        raise UsageError("--quantize: int8 weights cannot be trained")
    bench = RolloutBench(args)
    console = make_console()
    try:
        bench.measure()
    finally:  # interrupted, what was measured so far is still worth reading
        bench.show(console)
    return exit_status(claims(bench.report))


class RolloutBench:
    """
    Args:
        args (`Namespace`): The command's.

    Attributes:
        report (`dict`): As --json writes it.
    """

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.name = args.model or str(demo_folder("--model") / "models" / "target")
        self.prompts = _prompts(args)
        if len(self.prompts) % args.prompts_per_step:
            raise UsageError(f"--prompts-per-step: {args.prompts_per_step} does not divide {len(self.prompts)} prompts")
        self.tokenizer = self._load_tokenizer()
        policy, larger = self._new_models()
        self.names = list(dict.fromkeys([PLAIN, *(args.assistants or _default_names())]))
        for name in self.names[1:]:
            self._assistant(name, policy, larger)  # refuses what does not fit
        model = policy if larger is None else larger
        self.report: dict[str, Any] = {
            "command": command_of(args),
            "environment": environment(model.device, model.dtype),
            "parameters": policy.num_parameters(),
            "rollout_parameters": model.num_parameters(),
            "num_prompts": len(self.prompts),
            "assistants": {},
        }

    def measure(self) -> None:
        """One run after the other."""
        args, reference = self.args, None
        per_run = args.epochs * len(self.prompts) // args.prompts_per_step
        settings = Settings(
            args.generations, args.prompts_per_step, args.epochs, args.max_new_tokens, args.temperature,
            args.learning_rate, args.seed,
        )  # fmt: skip
        with track(total=per_run * len(self.names), desc="training", unit=" steps") as progress:
            for name in self.names:
                progress.set_postfix_str(name)
                policy, larger = self._new_models()
                assistant, online = self._assistant(name, policy, larger)
                prompts = [self._as_chat(item) for item in self.prompts]
                done = train(policy, larger, self.tokenizer, prompts, assistant, settings, progress.update)
                reference = reference or done
                self._add(name, summary(done, reference, args.epochs), online)

    def _add(self, name: str, found: Summary, online: OnlineDistillation | None) -> None:
        row = dict(found)
        if online is not None:
            row["learning"] = {key: vars(item) for key, item in online.statistics.items()}
            online.close()
        self.report["assistants"][_shown(name)] = row
        if self.args.json:
            replace_json(self.args.json, self.report)

    def show(self, console: Console) -> None:
        if self.report["assistants"]:
            print_report(self.report, console)

    def _load_tokenizer(self) -> PreTrainedTokenizerBase:
        tokenizer = load_tokenizer(self.name)
        if tokenizer is None:
            raise UsageError(f"--model: {self.name!r} has no tokenizer")
        return tokenizer

    def _new_models(self) -> tuple[PreTrainedModel, PreTrainedModel | None]:
        """The policy, and what rolls out for it at the cost of more parameters."""
        args = self.args
        policy = load_model(self.name, args.dtype, args.device)
        if not (num := num_parameters(args)):
            return policy, None
        try:
            return policy, enlarge(policy, num)
        except ValueError as error:
            raise UsageError(f"--parameters: {error}") from error

    def _assistant(
        self, name: str, policy: PreTrainedModel, larger: PreTrainedModel | None
    ) -> tuple[Any, OnlineDistillation | None]:
        """New drafters, of which those of earlier runs know nothing."""
        if name == PLAIN:
            return PLAIN, None
        own = name.removeprefix(_ONLINE)
        found = DrafterFiles(policy, larger, "--assistants").named(own).assistant
        if own == name:
            return found, None
        # At the same rollouts, the same is learnt; what that takes is part of the rollouts' time.
        every = self.args.generations * self.args.prompts_per_step
        online = OnlineDistillation(background=False, every_requests=every, seed=self.args.seed)
        config = SmartSpecConfig(found, online=online)
        try:
            resolve(config, policy if larger is None else larger)
        except ValueError as error:
            raise UsageError(f"--assistants: {name!r}: {error}") from error
        return config, online

    def _as_chat(self, prompt: str) -> Any:
        return [{"role": "user", "content": prompt}] if self.tokenizer.chat_template else prompt


def _prompts(args: argparse.Namespace) -> list[str]:
    folder = None if args.files else demo_folder(*missing_arguments(args))
    rows = [row for path in args.files or [folder / "prompts.jsonl"] for row in read_prompts(path)]
    if folder is not None:
        rows = [row for row in rows if row["category"] == _DEMO_CATEGORY]
    return [row["prompt"] for row in rows][: args.prompts]


def _default_names() -> list[str]:
    draft = str(demo_folder("--assistants") / "models" / "draft")
    both = f"suffix{JOINT}{draft}"
    return ["suffix", draft, both, f"{_ONLINE}{both}"]


def _shown(name: str) -> str:
    own = name.removeprefix(_ONLINE)
    return shown(own) + ", online" * (own != name)
