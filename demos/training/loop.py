"""The training loop: a budget of minutes or steps, checkpoints, a clean stop on Ctrl-C, held-out losses."""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedModel

from .batches import IGNORED, Batch, Mix, collate, group_by_length
from .tokenizer import Encoded

LossFn = Callable[[Batch], torch.Tensor]


@dataclass(frozen=True)
class TrainConfig:
    """`minutes` counts everything since the first step, over all resumed runs; the schedule ends at whichever of
    `minutes` and `steps` comes first."""

    minutes: float
    steps: int | None
    learning_rate: float
    precision: str = "autocast"  # or "fp32"
    accumulate: int = 2  # micro-batches a step
    warmup: float = 0.03  # part of the budget
    weight_decay: float = 0.1
    checkpoint_minutes: float = 4.0
    eval_minutes: float = 6.0


@dataclass
class Progress:
    """What a checkpoint remembers beside the weights."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0


class StopFlag:
    """Turns the first Ctrl-C (or SIGTERM) into a request to stop after the step: no step is saved half done."""

    def __enter__(self) -> "StopFlag":
        self.is_set = False
        self.previous = {}
        if threading.current_thread() is threading.main_thread():
            self.previous = {s: signal.signal(s, self._request) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _request(self, signum: int, frame: object) -> None:
        self.is_set = True
        self._restore()  # a second Ctrl-C stops at once

    def _restore(self) -> None:
        for signum, handler in self.previous.items():
            signal.signal(signum, handler)

    def __exit__(self, *exc_info: object) -> None:
        self._restore()


def predicted_logits(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """Logits of the positions that count only, float32 (count, vocab)."""
    hidden = model.model(input_ids=batch.input_ids.to(model.device), use_cache=False).last_hidden_state
    return model.lm_head(hidden.flatten(0, 1)[batch.positions.to(model.device)]).float()


def next_token_loss(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """Cross-entropy with the text, summed over the positions that count."""
    logits = predicted_logits(model, batch)
    return nn.functional.cross_entropy(logits, batch.labels.to(logits.device), ignore_index=IGNORED, reduction="sum")


def distillation_loss(draft: PreTrainedModel, target: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """KL divergence of the draft's next-token distribution from the target's, summed over positions."""
    with torch.no_grad():
        target_log_probs = predicted_logits(target, batch).log_softmax(-1)
    draft_log_probs = predicted_logits(draft, batch).log_softmax(-1)
    divergence = nn.functional.kl_div(draft_log_probs, target_log_probs, log_target=True, reduction="none").sum(-1)
    return divergence[: batch.num_predicted].sum()


def autocast(model: PreTrainedModel, precision: str) -> torch.autocast:
    """bfloat16 matrix products over float32 weights; 3 times as fast as float32 on a CPU with AMX."""
    return torch.autocast(model.device.type, torch.bfloat16, enabled=precision == "autocast")


@torch.no_grad()
def heldout_losses(
    model: PreTrainedModel, heldout: dict[str, Sequence[Encoded]], pad_id: int, max_rows: int, precision: str
) -> dict[str, float]:
    """Mean cross-entropy in nats per response token, by category, on the first `max_rows` rows of each."""
    losses = {}
    for category, rows in sorted(heldout.items()):
        rows = sorted(rows[:max_rows], key=lambda row: len(row.ids))
        total = count = 0
        lengths = torch.tensor([len(row.ids) for row in rows]).numpy()
        for picks in group_by_length(lengths, torch.arange(len(rows)).numpy(), batch_tokens=4096):
            batch = collate([rows[i] for i in picks], pad_id, response_only=True)
            with autocast(model, precision):
                total += next_token_loss(model, batch).item()
            count += batch.num_predicted
        losses[category] = round(total / count, 4)
    return losses


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW; norms are not decayed."""
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)


def schedule(done: float, config: TrainConfig) -> float:
    """Learning rate when the part `done` of the budget is used: linear warm-up, then half a cosine down to 2 %."""
    if done < config.warmup:
        return config.learning_rate * max(done / config.warmup, 0.01)
    return config.learning_rate * (
        0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min((done - config.warmup) / (1 - config.warmup), 1)))
    )


def save_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, mix: Mix, now: Progress) -> None:
    """Write to a side file first, so that an interruption leaves the last checkpoint whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    side = path.with_suffix(".tmp")
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "mix": (mix.pass_index, mix.batch_index),
        "progress": asdict(now),
    }
    torch.save(state, side)
    os.replace(side, path)


def load_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, mix: Mix) -> Progress:
    """Put everything back as it was saved; a fresh `Progress` where there is no checkpoint."""
    if not path.exists():
        return Progress()
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    mix.seek(*state["mix"])
    print(f"resuming from {path} at step {state['progress']['step']}")
    return Progress(**state["progress"])


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: LossFn, batches: list[Batch]) -> float:
    """One update from several micro-batches, each counting by its number of predicted tokens; returns the loss."""
    count = sum(batch.num_predicted for batch in batches)
    total = 0.0
    for batch in batches:
        loss = loss_fn(batch) / count
        loss.backward()
        total += loss.item()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return total


def train(
    model: PreTrainedModel, loss_fn: LossFn, mix: Mix, report: Callable[[], dict], path: Path, config: TrainConfig
) -> Progress:
    """Train until the budget is used, from the checkpoint at `path` if there is one.

    Args:
        loss_fn: summed loss of one batch.
        report: called every `eval_minutes`; its losses are printed.

    Raises:
        KeyboardInterrupt: after a Ctrl-C, once the running step is done and saved.
    """
    optimizer = make_optimizer(model, config)
    now = load_checkpoint(path, model, optimizer, mix)
    clock = time.monotonic()
    saved = reported = now.seconds
    loss_mean = None
    used = _used(now, config)
    bar = tqdm(total=100, initial=round(100 * used, 2), unit="%", desc=path.stem, mininterval=5, dynamic_ncols=True)
    with StopFlag() as stop, bar:
        while used < 1 and not stop.is_set:
            for group in optimizer.param_groups:
                group["lr"] = schedule(used, config)
            batches = [mix.next_batch() for _ in range(config.accumulate)]
            with autocast(model, config.precision):
                loss = train_step(model, optimizer, loss_fn, batches)
            now.step += 1
            now.tokens += sum(batch.input_ids.numel() for batch in batches)
            elapsed, clock = time.monotonic() - clock, time.monotonic()
            mean = now.seconds / (now.step - 1) if now.step > 5 else elapsed
            now.seconds += min(elapsed, 10 * mean)  # longer: the process was suspended, or reported losses
            loss_mean = loss if loss_mean is None else 0.98 * loss_mean + 0.02 * loss
            before, used = used, _used(now, config)
            bar.set_postfix_str(
                f"step {now.step}, loss {loss_mean:.3f}, {now.tokens / now.seconds:,.0f} tokens/s", refresh=False
            )
            bar.update(round(100 * min(used, 1), 2) - round(100 * before, 2))
            if now.seconds - reported > 60 * config.eval_minutes:
                reported = now.seconds
                bar.write(f"{path.stem} step {now.step} held-out loss: {report()}")
            if now.seconds - saved > 60 * config.checkpoint_minutes:
                saved = now.seconds
                save_checkpoint(path, model, optimizer, mix, now)
        save_checkpoint(path, model, optimizer, mix, now)
    if used < 1:
        print(f"stopped at step {now.step}, saved in {path}: the same command goes on from there")
        raise KeyboardInterrupt
    return now


def _used(now: Progress, config: TrainConfig) -> float:
    by_steps = now.step / config.steps if config.steps else 0.0
    return max(by_steps, now.seconds / (60 * config.minutes))
