"""`benchmarks rollouts`: what speculation does for rollouts of GRPO by TRL, and whether it changes training."""

import argparse
from functools import partial
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_smartspec.commands.common.arguments import UsageError, usage_errors
from hf_smartspec.commands.common.console import track
from hf_smartspec.commands.common.cost_matched import enlarge
from hf_smartspec.commands.common.drafters import DrafterFiles
from hf_smartspec.commands.common.models import demo_folder, load_model, load_tokenizer, read_prompts, use_machine
from hf_smartspec.commands.common.names import JOINT, shown
from hf_smartspec.commands.common.outputs import check_output
from hf_smartspec.commands.common.setup import missing_arguments, num_parameters
from hf_smartspec.online.distillation import OnlineDistillation
from hf_smartspec.prepare.config import SmartSpecConfig
from hf_smartspec.prepare.sources import resolve

from ...kit.session import Case, Section, new_session, print_head
from ...kit.tables import Row
from .report import claims, print_report, summary
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
    use_machine(args)
    bench = RolloutBench(args)
    return bench.session.run([bench.section()], print_head(bench.session, "rollouts"))


class RolloutBench:
    """
    Args:
        args (`Namespace`): The command's.

    Attributes:
        session (`Session`): Keeps the results of the runs.
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
        about = {"parameters": policy.num_parameters(), "rollout_parameters": model.num_parameters()}
        about["num_prompts"] = len(self.prompts)
        self.session = new_session(args, model.device, model.dtype, about, free=["assistants"])

    def section(self) -> Section:
        """Return one run after the other; all are compared with the first."""
        report = self.session.report
        exact = report["environment"]["dtype"] == "float32"
        cases = [Case(_shown(name), partial(self._run, name)) for name in self.names]
        return Section(
            "rollouts", lambda: cases, show=partial(print_report, report), claims=claims if exact else lambda rows: ()
        )

    def _run(self, name: str) -> Row:
        args = self.args
        settings = Settings(
            args.generations, args.prompts_per_step, args.epochs, args.max_new_tokens, args.temperature,
            args.learning_rate, args.seed,
        )  # fmt: skip
        policy, larger = self._new_models()
        assistant, online = self._assistant(name, policy, larger)
        prompts = [self._as_chat(item) for item in self.prompts]
        per_run = args.epochs * len(prompts) // args.prompts_per_step
        with track(total=per_run, desc="training", unit=" steps") as progress:
            done = train(policy, larger, self.tokenizer, prompts, assistant, settings, progress.update)
        row = summary(done, args.epochs)
        if online is not None:
            row["learning"] = {key: vars(item) for key, item in online.statistics.items()}
            online.close()
        return row

    def _load_tokenizer(self) -> PreTrainedTokenizerBase:
        tokenizer = load_tokenizer(self.name)
        if tokenizer is None:
            raise UsageError(f"--model: {self.name!r} has no tokenizer")
        return tokenizer

    def _new_models(self) -> tuple[PreTrainedModel, PreTrainedModel | None]:
        """Return the policy and, at the cost of more parameters, the model that generates in its place."""
        args = self.args
        policy = load_model(self.name, args.dtype, args.device)
        if not (num := num_parameters(args)):
            return policy, None
        with usage_errors("--parameters", ValueError):
            return policy, enlarge(policy, num)

    def _assistant(
        self, name: str, policy: PreTrainedModel, larger: PreTrainedModel | None
    ) -> tuple[Any, OnlineDistillation | None]:
        """Return new drafters, which have learnt nothing from earlier runs."""
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
        with usage_errors(f"--assistants: {name!r}", ValueError):
            resolve(config, policy if larger is None else larger)
        return config, online

    def _as_chat(self, prompt: str) -> Any:
        return [{"role": "user", "content": prompt}] if self.tokenizer.chat_template else prompt


def _prompts(args: argparse.Namespace) -> list[str]:
    folder = None if args.files else demo_folder(*missing_arguments(args))
    rows = [row for path in args.files or [folder / "prompts.jsonl"] for row in read_prompts(path)]
    if folder is not None:
        rows = [row for row in rows if row["category"] == _DEMO_CATEGORY]
    return [row["prompt"] for row in rows][: args.num_prompts]


def _default_names() -> list[str]:
    draft = str(demo_folder("--assistants") / "models" / "draft")
    both = f"suffix{JOINT}{draft}"
    return ["suffix", draft, both, f"{_ONLINE}{both}"]


def _shown(name: str) -> str:
    own = name.removeprefix(_ONLINE)
    return shown(own) + ", online" * (own != name)
