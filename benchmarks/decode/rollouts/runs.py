"""A run of GRPO by TRL. Each of its rollouts is made without drafts too, side by side."""

import hashlib
import importlib
import importlib.util
import operator
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_callback import PrinterCallback, TrainerCallback

from hf_smartspec.commands.common.arguments import UsageError
from hf_smartspec.commands.common.cost_matched import copy_weights
from hf_smartspec.commands.common.runs import eos_ids, synchronize, up_to_end
from hf_smartspec.decoding.statistics import GenerationStatistics
from hf_smartspec.generate import disable, enable

PLAIN = "none"
_WARM_UP = 4  # tokens

Generate = Callable[..., torch.Tensor]


class Settings(NamedTuple):
    """Arguments of the command."""

    num_generations: int
    prompts_per_step: int
    num_epochs: int
    max_new_tokens: int
    temperature: float
    learning_rate: float
    seed: int


class Rollout(NamedTuple):
    """
    One call of `generate`: seconds, those of the same without drafts, and those of transformers' own sampling, whose
    completions are others, for as many forwards; what speculation did.
    """

    seconds: float
    plain_seconds: float
    own_seconds: float
    is_same: bool  # whether all completions are those of plain generation
    lengths: list[int]  # of the completions, up to where they end
    statistics: GenerationStatistics


@dataclass
class Run:
    """
    Results of a run.

    Args:
        rollouts (list of `Rollout`): The rollouts in order.
        losses (list of `float`): Loss of each step of the optimizer.
        entropies (list of `float`): Entropy of the policy's distributions at each step, in nats.
        rewards (list of `float`): Mean reward of each step.
        texts (list of `torch.Tensor`): All completions, rollout by rollout.
        weights (list of `torch.Tensor`): The policy's weights after training.
    """

    rollouts: list[Rollout] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    texts: list[torch.Tensor] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)

    def digest(self) -> str:
        """Return a checksum of completions, losses and final weights: runs with the same one are the same."""
        found = hashlib.sha256(repr(self.losses).encode())
        for item in (*self.texts, *self.weights):
            content = item.detach().cpu().contiguous().view(-1).view(torch.uint8)
            found.update(repr(tuple(item.shape)).encode() + content.numpy().tobytes())
        return found.hexdigest()


class PairedRollouts:
    """
    Replacement of the policy's `generate`: each call is made with an assistant, without drafts, and by transformers
    itself, from the same state of torch's random numbers and in turns.

    Args:
        run (`Run`): Is filled in.
        policy (`PreTrainedModel`): Is trained.
        larger (`PreTrainedModel`, *optional*): The same at the cost of a larger one, which generates in its place.
        assistant: What `assistant=` is.
    """

    def __init__(self, run: Run, policy: PreTrainedModel, larger: PreTrainedModel | None, assistant: Any):
        self.run, self.policy, self.larger, self.assistant = run, policy, larger, assistant
        self.model = policy if larger is None else larger
        enable(self.model)
        self._generate: Generate = self.model.generate  # type: ignore[assignment]
        self._num_calls = 0
        policy.generate = self  # type: ignore[assignment]

    def end(self) -> None:
        vars(self.policy).pop("generate", None)
        if self.larger is not None:
            disable(self.larger)

    def warm_up(self, inputs: torch.Tensor) -> None:
        """Generate a few tokens, so that the model's speed is measured and code is compiled."""
        with torch.random.fork_rng(), torch.no_grad():
            for assistant in (None, PLAIN, self.assistant):
                options: dict[str, Any] = {"max_new_tokens": _WARM_UP, "do_sample": True, "assistant": assistant}
                self._generate(inputs, attention_mask=torch.ones_like(inputs), **options)

    def __call__(self, **arguments: Any) -> torch.Tensor:
        if self.larger is not None:
            copy_weights(self.policy, self.larger)
        state = left = torch.get_rng_state()
        ways = [self.assistant, None] if self.assistant == PLAIN else [self.assistant, None, PLAIN]
        found: dict[int, tuple[torch.Tensor, float, GenerationStatistics]] = {}
        for turn in range(len(ways)):
            at = (turn + self._num_calls) % len(ways)
            torch.set_rng_state(state)
            found[at] = self._timed(arguments, ways[at])
            left = left if at else torch.get_rng_state()
        self._num_calls += 1
        torch.set_rng_state(left)
        (texts, seconds, statistics), (others, own_seconds, _) = found[0], found[1]
        plain, plain_seconds, _ = found.get(2, found[0])
        start = arguments["input_ids"].shape[1]
        lengths = self._lengths(texts[:, start:])
        own_seconds *= max(lengths) / max(self._lengths(others[:, start:]))  # the longest has a token of each forward
        is_same = torch.equal(texts, plain)
        self.run.rollouts.append(Rollout(seconds, plain_seconds, own_seconds, is_same, lengths, statistics))
        self.run.texts.append(texts)
        return texts

    def _timed(self, arguments: dict[str, Any], assistant: Any) -> tuple[torch.Tensor, float, GenerationStatistics]:
        synchronize(self.model.device)
        start = time.perf_counter()
        texts = self._generate(**arguments, assistant=assistant)
        synchronize(self.model.device)
        known: Any = self.model.smartspec_statistics
        return texts, time.perf_counter() - start, known.last

    def _lengths(self, completions: torch.Tensor) -> list[int]:
        ends = set(eos_ids(self.policy))
        return [len(up_to_end(row, ends)) for row in completions.tolist()]


def train(
    policy: PreTrainedModel,
    larger: PreTrainedModel | None,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Any],
    assistant: Any,
    settings: Settings,
    progress: Callable[[], None] = lambda: None,
) -> Run:
    """
    Train the policy, which generates its rollouts with the assistant.

    Args:
        prompts (sequence): Texts, or chats.
        progress (`Callable`): Called after every rollout.
    """
    trl, datasets = importlib.import_module("trl"), importlib.import_module("datasets")
    run = Run()
    with TemporaryDirectory() as folder:
        options = trl.GRPOConfig(
            output_dir=folder,
            use_cpu=policy.device.type == "cpu",
            bf16=False,  # weights are trained in the dtype that they have
            seed=settings.seed,
            per_device_train_batch_size=settings.num_generations * settings.prompts_per_step,
            num_generations=settings.num_generations,
            max_completion_length=settings.max_new_tokens,
            num_train_epochs=settings.num_epochs,
            temperature=settings.temperature,
            learning_rate=settings.learning_rate,
            lr_scheduler_type="constant",
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = trl.GRPOTrainer(
            model=policy,
            reward_funcs=arithmetic,
            args=options,
            train_dataset=datasets.Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
            processing_class=tokenizer,
        )
        trainer.remove_callback(PrinterCallback)
        rollouts = PairedRollouts(run, policy, larger, assistant)
        try:
            rollouts.warm_up(tokenizer("1 + 2 =", return_tensors="pt").input_ids.to(policy.device))
            trainer.add_callback(_AfterSteps(progress))
            trainer.train()
        finally:
            rollouts.end()
    history = [item for item in trainer.state.log_history if "loss" in item]
    run.losses, run.entropies, run.rewards = (
        [float(item[name]) for item in history] for name in ("loss", "entropy", "reward")
    )
    run.weights = [item.detach().clone() for item in policy.parameters()]
    return run


class _AfterSteps(TrainerCallback):
    def __init__(self, function: Callable[[], None]):
        self.function = function

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.function()


def check_libraries() -> None:
    """Raise `UsageError` where TRL is not installed."""
    if importlib.util.find_spec("trl") is None:
        raise UsageError('rollouts are those of TRL: pip install "hf-smartspec[rl]"')


# Rewards of completions of arithmetic problems, by rules: GSM8K's calculator notes, and the form of the answer.

_NOTE = re.compile(r"<<(\d+)([-+*])(\d+)=(\d+)>>")
_ANSWER = re.compile(r"#### -?\d+\s*$")
_OPERATORS = {"-": operator.sub, "+": operator.add, "*": operator.mul}


def arithmetic(completions: list[Any], **_: Any) -> list[float]:
    """
    Return for each completion the share of its notes like <<3*4=12>> that are right, and a half more if it ends in ####
    and a number.
    """
    return [_reward(item if isinstance(item, str) else item[-1]["content"]) for item in completions]


def _reward(text: str) -> float:
    notes = _NOTE.findall(text)
    right = sum(_OPERATORS[sign](int(a), int(b)) == int(result) for a, sign, b, result in notes)
    return right / max(len(notes), 1) + 0.5 * bool(_ANSWER.search(text))
