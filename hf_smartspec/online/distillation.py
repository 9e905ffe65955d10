"""`OnlineDistillation`: drafters learn from the requests that they serve."""

import atexit
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

from ..candidates.base import TreeCandidateGenerator
from ..candidates.combined.routed.source import RoutedCandidates
from ..candidates.forwarding import unwrapped
from ..decoding.learning import Learning, Recorder
from .checkpoint import Checkpoint
from .learner import Learner, LearningEndedError, LearningStatistics
from .options import LearningOptions
from .students import check_drafts, check_student, module_of, student_of

_all: "WeakSet[OnlineDistillation]" = WeakSet()
_running: "WeakSet[OnlineDistillation]" = WeakSet()  # objects that have a thread, or have had one


class OnlineDistillation(Learning):
    """
    Online learning of drafters from the requests that they draft for (Online Speculative Decoding, algorithm 1): of
    draft models, their LoRA adapters (then only these), Medusa heads and heads of EAGLE-3. Pass it as `online=` to an
    `Engine` or a `SmartSpecConfig`, the same object to all calls that are to train the same drafters.

    Whatever the weights are, outputs are the same as without speculation. New weights are taken over between two steps,
    and only if shadow drafts of held-out texts are as good as before, up to the error of so few texts; if not, training
    continues, and after five such updates in a row it restarts from the weights that draft.

    Args:
        preset (`str`, *optional*): "published" is algorithm 1 of the paper, unless other options change it: every
            request is learnt, where its drafts were wrong, over the whole vocabulary; after 8 requests, between two
            calls, drafters are updated, draft with the new weights at once, and all samples are released.
        every_requests, every_tokens, every_seconds (*optional*): An update is due as soon as so many requests, tokens
            or seconds have come since the last one (the paper's interval I, 8 requests).
        most_requests (`int`, *optional*): Lets the interval follow load and drift (section 4.2.1): from
            `every_requests`, where there was capacity to train all the time, up to so many, the less of it there was;
            `every_requests` again when drafts become worse. Without it, the interval is fixed.
        loss (`str`): "kl", "reverse_kl", "jsd" (with `beta`), or "labels" (the target's tokens alone).
        temperature (`float`): Softens both distributions in the loss.
        positions (`str`): "all", or only the "errors" of drafts, as in algorithm 1.
        sampling (`str`): The texts to train on (section 4.1): the target's ("teacher"); the drafts, rejected ones too,
            since verification has scored them ("student"); or both ("mixed"). The last two are for draft models only;
            where several sources draft together, the drafts of all count.
        top_k (`int`, *optional*): Tokens of the target's distributions that are kept; all others count as one. With
            None, all are kept (equation 3): 8 bytes of each for every token of an answer.
        max_bytes (`int`): Bound on the memory of samples.
        eviction (`str`): Samples that are kept after training, for replay: the "newest", the most "informative", or
            none ("release", as in the paper).
        replay (`float`): Number of kept samples that are replayed with each new one.
        passes (`int`): Passes over the samples in an update.
        batch_tokens (`int`): Tokens of an optimizer step, with padding.
        max_length (`int`): Tokens of a sample; long prompts are cut at the start.
        learning_rate (`float`), optimizer (`str`): "adamw", or "adamw_8bit" where bitsandbytes is installed.
        background (`bool`): Train in a separate thread, of the lowest priority. Otherwise calls run due updates when
            they end, in their own time; then the same requests give the same weights.
        max_running (`int`): Requests that may run while a thread trains in the background; none may wait.
        shadow (`int`): Number of held-out texts for shadow drafting; with 0, all updates are taken over.
        tolerance (`float`): Allowed drop of their acceptance rate, beyond two standard errors.
        checkpoint (`str` or `Path`, *optional*): Folder that what was learnt is saved in, and resumed from.
        seed (`int`): Seed of the order of samples.

    Raises:
        ValueError: for options out of range.

    Example:

        >>> online = OnlineDistillation(checkpoint="learnt")
        >>> engine = hf_smartspec.Engine(model, assistant=draft, online=online)
        >>> print(online.report())
    """

    def __init__(self, preset: str | None = None, **options: Any):
        self.options = LearningOptions.of(preset, **options)
        self._learners: dict[int, Learner] = {}  # by the id of the drafting module, while that lives
        self._reading: WeakSet[nn.Module] = WeakSet()  # drafters that have passed `check_drafts`
        self._changed = threading.Condition()
        self._loads: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()  # of loops: running, waiting
        self._thread: threading.Thread | None = None
        self._is_closed = self._is_learning = False
        self._num_urging = 0
        _all.add(self)

    # Called by the decoding loop

    def check(self, source: TreeCandidateGenerator, target: nn.Module) -> None:
        modules = [module for item in _members(source) if (module := module_of(item)) is not None]
        for module in modules:
            check_student(module, target)
            if self.options.learns_drafts and module not in self._reading:
                check_drafts(module, self.options.sampling, self.options.max_length)
                self._reading.add(module)
        if not modules:
            raise ValueError(
                f"`online` is given, and {type(source).__name__} has nothing that can learn: pass a draft model of the "
                "target's tokenizer, Medusa heads, or heads of EAGLE-3 as `assistant`."
            )

    def recorders(self, sources: Sequence[TreeCandidateGenerator]) -> tuple[Recorder, ...]:
        learners = [learner for source in sources if (learner := self._learner_of(source)) is not None]
        return tuple(learner.recorder for learner in dict.fromkeys(learners) if not learner.has_failed)

    def between_steps(self, loop: Any, num_running: int, num_waiting: int) -> None:
        load = num_running, num_waiting
        before = self._loads.get(loop)
        if before == load and not self._has_news:
            return
        with self._changed:
            if num_running or num_waiting:
                self._loads[loop] = load
            else:
                self._loads.pop(loop, None)
            self._publish(loop)
            is_idle = self._has_capacity()
            for learner in self._learners.values():
                learner.note_load(is_idle)
            self._changed.notify_all()
        if not self.options.background and not num_running and self._is_due:
            self.update()

    @property
    def _has_news(self) -> bool:
        return any(learner.has_pending for learner in list(self._learners.values()))

    @property
    def _is_due(self) -> bool:
        return not self._is_closed and any(learner.is_due for learner in list(self._learners.values()))

    def _learner_of(self, source: TreeCandidateGenerator) -> Learner | None:
        module = module_of(source)
        if module is None:
            return None
        with self._changed:
            learner = self._learners.get(id(module))
            if learner is None:
                name = self._new_name(module)
                learner = Learner(student_of(module), self.options, self._checkpoint(name), name)
                self._learners[id(module)] = learner
                weakref.finalize(module, _drop_learner, weakref.ref(self), id(module)).atexit = False
            self._start_thread()
            learner.sources.add(unwrapped(source))
        return learner

    def _new_name(self, module: Any) -> str:
        """Return a unique name of a drafter: its folder's, with a number if another drafter has that."""
        base = os.path.basename(os.path.normpath(getattr(module, "name_or_path", "") or type(module).__name__))
        name = base = re.sub(r"[^\w.-]", "_", base)
        number, known = 1, {learner.name for learner in list(self._learners.values())}
        while name in known:
            number += 1
            name = f"{base}-{number}"
        return name

    def _checkpoint(self, name: str) -> Checkpoint | None:
        folder = self.options.checkpoint
        return None if folder is None else Checkpoint(Path(folder) / f"{name}.pt")

    def _publish(self, loop: Any = None) -> None:
        """Take over new weights, unless another loop may be drafting just now."""
        if all(other is loop for other in list(self._loads)):
            for learner in list(self._learners.values()):
                if learner.has_pending:
                    _guarded(learner, learner.publish)

    # Learning

    def _start_thread(self) -> None:
        """Start the thread at the first request, and at the first one after a fork."""
        if self.options.background and self._thread is None and not self._is_closed:
            arguments = weakref.ref(self), self._changed
            self._thread = threading.Thread(target=_learn, args=arguments, name="hf-smartspec online", daemon=True)
            self._thread.start()
            _running.add(self)

    def _after_fork(self) -> None:
        """Reset threads and locks in a child of `os.fork`, where threads of the parent do not exist."""
        self._changed, self._loads, self._thread = threading.Condition(), WeakKeyDictionary(), None
        self._is_learning, self._num_urging = False, 0
        for learner in self._learners.values():
            learner.after_fork()

    def update(self, only_due: bool = True) -> None:
        """
        Run updates that are due, or all for which there are samples, in this thread and at once. An update of the
        background thread that waits for capacity runs, too. A drafter whose update fails stops learning; `report()` has
        the error.
        """
        with self._changed:
            self._num_urging += 1
            self._changed.notify_all()
        try:
            for learner in list(self._learners.values()):
                if learner.is_due or not only_due:
                    _guarded(learner, learner.update)
        finally:
            with self._changed:
                self._num_urging -= 1
                self._publish()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until no update runs or is due, and return True; return False after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._is_learning and not self._is_due, timeout)

    def close(self) -> None:
        """End learning. An update that has not ended is lost."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def is_idle(self) -> bool:
        """Return whether there is capacity to train: at most `max_running` requests run, and none waits."""
        with self._changed:
            return self._has_capacity()

    def _has_capacity(self) -> bool:
        loads = list(self._loads.values())
        return sum(running for running, _ in loads) <= self.options.max_running and not any(num for _, num in loads)

    # Reports

    @property
    def statistics(self) -> dict[str, LearningStatistics]:
        """Statistics of the drafters in use, by name."""
        return {learner.name: learner.statistics for learner in list(self._learners.values())}

    def report(self) -> str:
        """Return one line of text for each drafter."""
        lines = [
            f"{name}: {item.requests} requests, {item.tokens} tokens; {item.updates} updates in {item.seconds:.1f} s, "
            f"{item.swaps} taken over, {item.rollbacks} not; shadow acceptance {item.acceptance_before:.3f} -> "
            f"{item.acceptance:.3f}; samples {item.buffer_bytes / 2**20:.1f} MiB"
            + f"; learns no more: {item.failure}"
            * bool(item.failure)
            for name, item in self.statistics.items()
        ]
        return "\n".join(lines) or "Nothing has been learnt yet."


@atexit.register
def _close_all() -> None:
    """Stop threads that learn at exit: one that computes while the interpreter ends would crash the process."""
    for online in list(_running):
        if online._thread is not None and online._thread.is_alive():  # not in a child of `os.fork`
            online.close()


def _after_fork() -> None:
    for online in list(_all):
        online._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _drop_learner(reference: "weakref.ref[OnlineDistillation]", module_id: int) -> None:
    """Drop the learner of a module that has been freed."""
    online = reference()
    if online is not None:
        online._learners.pop(module_id, None)


def _guarded(learner: Learner, call: Callable[..., Any], *args: Any) -> None:
    """Call a method of a learner; an error ends learning for this drafter alone."""
    try:
        call(*args)
    except LearningEndedError:
        raise
    except Exception as error:
        learner.give_up(error)


def _members(source: TreeCandidateGenerator) -> Iterator[TreeCandidateGenerator]:
    """Yield all sources that draft for some request."""
    for stage in source.stages:
        if not isinstance(stage, RoutedCandidates):
            yield stage
            continue
        for item in stage.sources:
            yield from _members(item)


def _learn(reference: "weakref.ref[OnlineDistillation]", changed: threading.Condition) -> None:
    """Run updates that are due, in a thread of its own, until the `OnlineDistillation` is closed or freed."""
    with suppress(AttributeError, OSError):  # priority of this thread alone, on systems that have it
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    while True:
        online = reference()
        if online is None or online._is_closed:
            return
        due = [learner for learner in list(online._learners.values()) if learner.is_due]
        if not due:
            del online, due
            with changed:
                changed.wait(1.0)  # with a time-out, since no event is sent when the object is freed
            continue
        online._is_learning = True
        try:
            for learner in due:
                _guarded(learner, learner.update, _Turn(online, changed))
                with changed:
                    online._publish()
        except LearningEndedError:
            return
        finally:
            with changed:
                online._is_learning = False
                changed.notify_all()
        del online, due, learner


class _Turn:
    """Blocks, when called, until there is capacity to train; raises `LearningEndedError` once learning is closed."""

    def __init__(self, online: OnlineDistillation, changed: threading.Condition):
        self.online, self.changed = online, changed

    def __call__(self) -> None:
        with self.changed:
            while not self.changed.wait_for(self._may_go_on, 1.0):
                pass  # with a time-out, since a loop that is freed sends no event
        if self.online._is_closed:
            raise LearningEndedError

    def _may_go_on(self) -> bool:
        return self.online._is_closed or self.online._num_urging > 0 or self.online.is_idle
