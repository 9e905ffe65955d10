"""Training of one drafter on the requests that it serves (Online Speculative Decoding, algorithm 1)."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any
from weakref import WeakSet

import numpy as np
import torch

from ..candidates.base import TreeCandidateGenerator
from ..log import get_logger
from .buffer import ReplayBuffer
from .checkpoint import Checkpoint
from .interval import UpdateInterval
from .losses import divergence, overlap
from .options import LearningOptions
from .recorder import SampleRecorder
from .samples import Batch, Sample, in_batches
from .students import Predictions, Student

logger = get_logger(__name__)

_WARM_UP = 10  # optimizer steps until the learning rate is reached
_MAX_NORM = 1.0
_NOTABLE = 0.05  # rise of the acceptance rate after which policies reset their estimates
_STATES = {  # keys of a parameter's state, by optimizer
    "adamw": {"step", "exp_avg", "exp_avg_sq"},
    "adamw_8bit": {"step", "state1", "state2", "qmap1", "qmap2", "absmax1", "absmax2"},
}
_HELD_OUT = 4  # one sample in so many is held out for shadow drafting first
_CHANCE = 2.0  # standard errors by which shadow drafts may be worse
_MOST_REFUSED = 4  # refused updates in a row; one more, and what they have learnt is discarded


@dataclass
class LearningStatistics:
    """
    Counters of a drafter's learning. `acceptance` is the acceptance rate of shadow drafts by the weights in use after
    the latest update, on held-out texts; `acceptance_before` is that of the weights in use before it, on the same
    texts. `interval` is the present number of requests up to an update, 0 where tokens or seconds alone decide.
    `meetings` counts updates that began from a mean with another replica's weights.
    """

    requests: int = 0
    tokens: int = 0
    updates: int = 0
    steps: int = 0
    swaps: int = 0
    rollbacks: int = 0
    seconds: float = 0.0
    loss: float = float("nan")
    acceptance_before: float = float("nan")
    acceptance: float = float("nan")
    meetings: int = 0
    buffer_bytes: int = 0
    interval: int = 0
    failure: str = ""


class LearningEndedError(Exception):
    """Ends an update, since learning has been closed."""


class Learner:
    """
    Trains a copy of a drafter on recorded samples, and publishes its weights.

    Args:
        student (`Student`): The drafter and its copy.
        options (`LearningOptions`): Options of learning.
        checkpoint (`Checkpoint`, *optional*): The file that what was learnt is saved in, and resumed from.
        name (`str`): The drafter's name in reports.
    """

    def __init__(
        self, student: Student, options: LearningOptions, checkpoint: Checkpoint | None = None, name: str = "drafter"
    ):
        self.student, self.options, self.checkpoint, self.name = student, options, checkpoint, name
        self.recorder = SampleRecorder(
            self._keep, options.top_k, student.hidden_layers, options.max_length, options.learns_drafts
        )
        self.sources: WeakSet[TreeCandidateGenerator] = WeakSet()  # sources that draft with the student's module
        self._buffer = ReplayBuffer(options.max_bytes, options.eviction)
        self._lock = threading.Lock()  # guards the buffer, the counters, and `_pending`
        self._updating = threading.Lock()  # one update at a time
        self._statistics = LearningStatistics()
        self._since_update = [0, 0]  # requests, tokens
        self._updated_at = time.monotonic()
        least = options.every_requests or 0
        self._interval = UpdateInterval(least, options.most_requests or least)
        self._pending: list[torch.Tensor] | None = None
        self._num_refused = 0  # updates since the last accepted one; each continues from the one before
        self._noticed, self._num_renewals = 0.0, 0  # acceptance rate at the latest renewal of policies' estimates
        self._optimizer = options.new_optimizer([item for _, item in student.parameters])
        self._generator = np.random.default_rng(options.seed)
        if checkpoint is not None:
            checkpoint.begin(student.live_weights())
            self._resume(checkpoint)

    # Called by threads that serve

    def _keep(self, sample: Sample) -> None:
        sample = sample.end(self.options.max_length)
        with self._lock:
            counts = self._statistics
            counts.requests += 1
            counts.tokens += len(sample.response)
            self._since_update[0] += 1
            self._since_update[1] += len(sample.response)
            if self.has_failed:
                return
            self._interval.note_request(float(sample.errors.mean()) if len(sample.errors) else 0.0)
            if self.options.shadow and counts.requests % _HELD_OUT == 0:
                self._buffer.hold_out(sample, self.options.shadow)
            else:
                self._buffer.add(sample)

    def note_load(self, is_idle: bool) -> None:
        """Record whether there is capacity to train from now on."""
        with self._lock:
            self._interval.note_load(is_idle)

    @property
    def has_failed(self) -> bool:
        return bool(self._statistics.failure)

    def give_up(self, error: Exception) -> None:
        """End learning after an error; the drafter keeps its weights."""
        with self._lock:
            self._statistics.failure, self._pending = repr(error), None
            self._buffer.clear()
        logger.warning(f"{self.name} learns no more, and drafts as it is: {error!r}")

    def after_fork(self) -> None:
        """Replace locks and gradients in a child of `os.fork`: threads that held or computed them are the parent's."""
        self._lock, self._updating = threading.Lock(), threading.Lock()
        self._optimizer.zero_grad(set_to_none=True)

    @property
    def is_due(self) -> bool:
        """Return whether enough requests, tokens or seconds, and any samples, have come since the last update."""
        requests, tokens = self._since_update
        options, seconds = self.options, time.monotonic() - self._updated_at
        limits = (self._interval.requests or None, options.every_tokens, options.every_seconds)
        done = zip((requests, tokens, seconds), limits)
        return bool(self._buffer.new) and any(limit is not None and value >= limit for value, limit in done)

    @property
    def has_pending(self) -> bool:
        return self._pending is not None

    def publish(self) -> None:
        """Copy the learnt weights, if any, into the drafting module. No thread may draft with it meanwhile."""
        with self._lock:
            weights, self._pending = self._pending, None
            if weights is None or self.student.module is None:
                return
            self.student.publish(weights)
            self._statistics.swaps += 1
        for source in list(self.sources):
            source.weights_version += 1
            source.num_renewals = self._num_renewals

    @property
    def statistics(self) -> LearningStatistics:
        with self._lock:
            return replace(self._statistics, buffer_bytes=self._buffer.num_bytes, interval=self._interval.requests)

    # Called by the thread that learns

    def update(self, go_on: Callable[[], None] = lambda: None) -> bool:
        """
        Train on new and replayed samples, and leave new weights for `publish`.

        Args:
            go_on (`Callable`): Called before each piece of work; returns when there is capacity for it, and raises
                `LearningEndedError` if learning has been closed.

        Returns:
            Whether there are new weights; False if their shadow drafts are worse.
        """
        # Calls may end within a caller's `inference_mode` or `autocast`, which must not apply to training.
        no_autocast = torch.autocast(self.student.device.type, enabled=False)
        with self._updating, torch.inference_mode(False), no_autocast:
            return self._update(go_on)

    def _update(self, go_on: Callable[[], None]) -> bool:
        with self._lock:
            new, replayed = self._buffer.take(self._num_replayed(), self._generator)
            fresh = list(self._buffer.fresh)
            self._since_update, self._updated_at = [0, 0], time.monotonic()
            self._interval.restart()
            module = self.student.module  # a reference, so that the module lives until the update ends
            if not new or module is None:
                return False
            before = self._pending or self.student.live_weights()
        start = time.perf_counter()
        try:
            if not self._num_refused:
                self.student.take(before)
            self._meet_others()
            self._learn([*new, *replayed], go_on)
            is_better = self._judge(before, fresh or new, go_on)
        except BaseException:
            self._restart()
            with self._lock:
                if not self.has_failed:
                    self._buffer.return_new(new)
            raise
        with self._lock:
            if self.has_failed:  # `give_up` was called meanwhile
                return False
            self._buffer.put_back(new)
            counts = self._statistics
            counts.updates += 1
            counts.seconds += time.perf_counter() - start
            if is_better:
                self._pending, self._num_refused = self.student.weights(), 0
                self._notice(counts.acceptance)
            else:
                counts.rollbacks += 1
                self._refuse()
        if is_better and self.checkpoint is not None:
            self.checkpoint.save(self.student.weights(), self._optimizer.state_dict(), vars(self.statistics))
        return is_better

    def _meet_others(self) -> None:
        """
        Take the mean of these weights and those that a replica has saved in the same file meanwhile, if one has: all
        are drawn to one centre, which the file holds (elastic averaging, Zhang et al., 2015). Not without shadow
        drafts, which alone tell whether the other's weights make these worse.
        """
        shapes = [tuple(item.shape) for _, item in self.student.parameters]
        found = self.checkpoint.load_of_others(shapes) if self.checkpoint is not None and self.options.shadow else None
        if found is not None:
            own = self.student.weights()
            self.student.take([(item + other.to(item)) / 2 for item, other in zip(own, found.weights)])
            self._statistics.meetings += 1

    def _refuse(self) -> None:
        """
        Keep the weights in training, although older texts may be drafted worse for a while; restart after too many
        refused updates in a row, or if weights are not finite.
        """
        self._num_refused += 1
        is_sound = all(bool(item.isfinite().all()) for _, item in self.student.parameters)
        if self._num_refused > _MOST_REFUSED or not is_sound:
            self._restart()

    def _restart(self) -> None:
        """Let the next update start from the weights that draft, with a new optimizer."""
        self._num_refused = 0
        self._optimizer = self.options.new_optimizer([item for _, item in self.student.parameters])

    def _notice(self, acceptance: float) -> None:
        """Count a renewal if acceptance has risen by `_NOTABLE`: policies then reset their estimates of the drafts."""
        if not acceptance < self._noticed + _NOTABLE:  # also where it is NaN, without shadow drafts
            self._noticed, self._num_renewals = acceptance, self._num_renewals + 1

    def _num_replayed(self) -> int:
        return round(self.options.replay * len(self._buffer.new))

    @torch.enable_grad()
    def _learn(self, samples: Sequence[Sample], go_on: Callable[[], None]) -> None:
        options = self.options
        parameters = [item for _, item in self.student.parameters]
        total = num = 0.0
        for _ in range(options.passes):
            batches = in_batches(samples, options.batch_tokens)
            for index in self._generator.permutation(len(batches)):
                go_on()
                loss = self._loss(self._batch(batches[index]))
                if loss is None:
                    continue
                loss.backward(inputs=parameters)  # tensors shared with the target get no gradients
                self._step()
                total, num = total + float(loss.detach()), num + 1
        if num:
            self._statistics.loss = total / num

    def _batch(self, samples: Sequence[Sample]) -> Batch:
        options, device = self.options, self.student.device
        if options.learns_drafts:
            return Batch.with_drafts(samples, device, options.sampling == "student")
        return Batch.of(samples, device, options.positions == "errors")

    def _loss(self, batch: Batch) -> torch.Tensor | None:
        losses = [self._distance(item, batch) * item.weight for item in self._predictions(batch) if len(item.logits)]
        return torch.stack(losses).sum() if losses else None

    def _predictions(self, batch: Batch) -> list[Predictions]:
        student = self.student
        # Half-precision drafters are trained in their dtype, which is several times as fast.
        with torch.autocast(student.device.type, student.dtype, enabled=student.dtype.itemsize == 2):
            return list(student.predictions(batch))

    def _distance(self, item: Predictions, batch: Batch) -> torch.Tensor:
        own, options = self.student.own, self.options
        ids, probs, tokens = own(batch.top_ids[item.where]), batch.top_probs[item.where], own(batch.chosen[item.where])
        return divergence(item.logits, ids, probs, tokens, options.loss, options.beta, options.temperature).mean()

    def _step(self) -> None:
        parameters = [item for _, item in self.student.parameters]
        norm = torch.nn.utils.clip_grad_norm_(parameters, _MAX_NORM)
        warmth = min(1.0, (self._statistics.steps + 1) / _WARM_UP)
        for group in self._optimizer.param_groups:
            group["lr"] = warmth * self.options.learning_rate
        if norm.isfinite():  # half precision may overflow
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        torch.clear_autocast_cache()  # drops casts of the weights before the step
        self._statistics.steps += 1

    def _judge(self, before: Sequence[torch.Tensor], samples: Sequence[Sample], go_on: Callable[[], None]) -> bool:
        """
        Return whether shadow drafts of held-out texts are no worse than with the weights `before`, up to the error of
        so few texts.
        """
        if not self.options.shadow:
            return True
        after = self.student.weights()
        new, weights = self._judged(samples, go_on)
        self.student.take(before)
        try:
            old, _ = self._judged(samples, go_on)
        finally:
            self.student.take(after)
        counts, total = self._statistics, weights.sum()
        chance = _CHANCE * float((new - old).std() * len(new) ** 0.5 / total) if len(new) > 1 else 0.0
        rates = [float(item.sum() / total) for item in (old, new)]
        is_better = bool(rates[1] >= rates[0] - self.options.tolerance - chance and np.isfinite(rates[1]))
        counts.acceptance_before, counts.acceptance = rates[0], rates[is_better]
        return is_better

    def acceptance(self, samples: Sequence[Sample]) -> float:
        """
        Return the acceptance rate of the drafter's first tokens (of heads: of all tokens, weighted as in the loss). A
        greedy sample counts equality with the target's token, a sampled one the probability of acceptance.
        """
        rights, weights = self._judged(samples, lambda: None)
        return float(rights.sum() / weights.sum())

    @torch.no_grad()
    def _judged(self, samples: Sequence[Sample], go_on: Callable[[], None]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the acceptance of every token times its weight, and this weight, both float32 `[n]`."""
        rights, weights = [torch.zeros(0)], [torch.zeros(0)]
        for is_greedy in (True, False):
            alike = [item for item in samples if item.is_greedy == is_greedy]
            for group in in_batches(alike, self.options.batch_tokens):
                go_on()
                batch = Batch.of(group, self.student.device)
                for item in self._predictions(batch):
                    rights.append(item.weight * self._rights(item, batch, is_greedy).cpu())
                    weights.append(torch.full((len(item.logits),), item.weight))
        return torch.cat(rights), torch.cat(weights)

    def _rights(self, item: Predictions, batch: Batch, is_greedy: bool) -> torch.Tensor:
        own = self.student.own
        if is_greedy:
            return (item.logits.argmax(dim=-1) == own(batch.ids[item.where])).float()
        return overlap(item.logits, own(batch.top_ids[item.where]), batch.top_probs[item.where])

    def _resume(self, checkpoint: Checkpoint) -> None:
        """Resume from the checkpoint, if it is this drafter's."""
        shapes = [tuple(item.shape) for _, item in self.student.parameters]
        found = checkpoint.load(shapes)
        if found is None:
            return
        self._resume_optimizer(found.optimizer)
        names = {field.name for field in fields(LearningStatistics)} - {"failure"}  # an error of another process
        known = {name: value for name, value in found.statistics.items() if name in names}
        self._statistics = replace(self._statistics, **known)
        self.student.take(found.weights)
        self._pending = self.student.weights()

    def _resume_optimizer(self, state: Mapping[str, Any]) -> None:
        """Load the optimizer's state, unless another kind of optimizer has saved it."""
        optimizer = self.options.new_optimizer([item for _, item in self.student.parameters])
        try:
            optimizer.load_state_dict(dict(state))
        except (KeyError, TypeError, ValueError) as error:
            logger.info(f"The optimizer starts without its saved state: {error}")
            return
        if all(set(item) <= _STATES[self.options.optimizer] for item in optimizer.state.values()):
            self._optimizer = optimizer
