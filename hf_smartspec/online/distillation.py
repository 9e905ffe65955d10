"""`OnlineDistillation`: drafters learn from what they serve."""

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
from ..decoding.learning import Learning, Recorder
from .checkpoint import Checkpoint
from .learner import Learner, LearningEndedError, LearningStatistics
from .options import LearningOptions
from .students import check_drafts, check_student, module_of, student_of

_all: "WeakSet[OnlineDistillation]" = WeakSet()
_running: "WeakSet[OnlineDistillation]" = WeakSet()  # that have a thread, or have had one


class OnlineDistillation(Learning):
    """
    Drafters learn from the requests that they draft for (Online Speculative Decoding, algorithm 1): draft models, their
    LoRA adapters (then only these), Medusa heads and heads of EAGLE-3. Pass it as `online=` to an `Engine` or a
    `SmartSpecConfig`, the same object to all calls that are to teach the same drafters.

    Whatever the weights are, outputs stay those of plain decoding. New weights are taken over between two steps, and
    only if shadow drafts of texts that nothing was learnt from are as good as before, as far as so few texts can tell;
    if not, learning goes on, and is given up after five updates in vain.

    Args:
        every_requests, every_tokens, every_seconds (*optional*): An update is due as soon as one of these has come
            since the last one (the paper's interval I, 8 requests).
        loss (`str`): "kl", "reverse_kl", "jsd" (with `beta`), or "labels" (the target's tokens alone).
        temperature (`float`): Softens both distributions in the loss.
        positions (`str`): "all", or only the "errors" of drafts, as in algorithm 1.
        sampling (`str`): Whose tokens are learnt (section 4.1): those of the target's text ("teacher"); those that were
            drafted, also what was rejected, since verification has scored that ("student"); or both ("mixed"). For
            draft models only; where several sources draft together, drafts are everybody's.
        top_k (`int`): Tokens of the target's distributions that are kept; the others count as one.
        max_bytes (`int`): Bound on the memory of samples.
        eviction (`str`): Which samples that were learnt stay, to be learnt again: "newest", "informative", or none
            ("release", as in the paper).
        replay (`float`): How many of these are learnt again beside each new one.
        passes (`int`): Over these, in an update.
        batch_tokens (`int`): Of an optimizer step, with padding.
        max_length (`int`): Tokens of a sample; of long prompts, the end.
        learning_rate (`float`), optimizer (`str`): "adamw", or "adamw_8bit" where bitsandbytes is installed.
        background (`bool`): Learn in a thread of its own, of the lowest priority. If not, updates that are due happen
            where calls end, and take their time there; at the same requests, weights are the same then.
        max_running (`int`): Requests that may run while it learns in the background; it never does while any waits.
        shadow (`int`): Texts that are held out for shadow drafting; 0 takes over all that is learnt.
        tolerance (`float`): How much lower their acceptance rate may be, beyond two standard errors.
        checkpoint (`str` or `Path`, *optional*): Folder where what was learnt is kept, and found.
        seed (`int`): Of the order in which samples are learnt.

    Raises:
        ValueError: for options out of range.

    Example:

        >>> online = OnlineDistillation(checkpoint="learnt")
        >>> engine = hf_smartspec.Engine(model, assistant=draft, online=online)
        >>> print(online.report())
    """

    def __init__(self, **options: Any):
        self.options = LearningOptions(**options)
        self._learners: dict[int, Learner] = {}  # by the id of what drafts, as long as anybody holds that
        self._reading: WeakSet[nn.Module] = WeakSet()  # drafters that can learn from their own texts
        self._changed = threading.Condition()
        self._loads: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()  # of loops: running, waiting
        self._thread: threading.Thread | None = None
        self._is_closed = self._is_learning = False
        self._num_urging = 0
        _all.add(self)

    # What the decoding loop asks

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
                weakref.finalize(module, _let_go, weakref.ref(self), id(module)).atexit = False
            self._begin()
            learner.sources.add(source.origin)
        return learner

    def _new_name(self, module: Any) -> str:
        """Drafters are told apart by the folders that they were loaded from, and the order in which they came."""
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
        """New weights are taken over, unless another loop may be drafting just now."""
        if all(other is loop for other in list(self._loads)):
            for learner in list(self._learners.values()):
                if learner.has_pending:
                    _guarded(learner, learner.publish)

    # Learning

    def _begin(self) -> None:
        """The thread runs from the first request on, and behind a fork anew."""
        if self.options.background and self._thread is None and not self._is_closed:
            arguments = weakref.ref(self), self._changed
            self._thread = threading.Thread(target=_learn, args=arguments, name="hf-smartspec online", daemon=True)
            self._thread.start()
            _running.add(self)

    def _begin_behind_fork(self) -> None:
        """In a child of `os.fork`, there is no thread, and whoever held a lock is gone."""
        self._changed, self._loads, self._thread = threading.Condition(), WeakKeyDictionary(), None
        self._is_learning, self._num_urging = False, 0
        for learner in self._learners.values():
            learner.begin_behind_fork()

    def update(self, only_due: bool = True) -> None:
        """
        Updates that are due, or all for which there are samples, in this thread and at once; one that waits for
        capacity meanwhile goes on. A drafter whose update fails learns no more; `report()` says so.
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
        """Waits until nothing is due; False after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._is_learning and not self._is_due, timeout)

    def close(self) -> None:
        """Ends learning. What an update has not brought to its end is lost."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def is_idle(self) -> bool:
        """Whether there is capacity to learn with."""
        with self._changed:
            loads = list(self._loads.values())
        return sum(running for running, _ in loads) <= self.options.max_running and not any(num for _, num in loads)

    # What became of it

    @property
    def statistics(self) -> dict[str, LearningStatistics]:
        """By drafter, of those that are still in use."""
        return {learner.name: learner.statistics for learner in list(self._learners.values())}

    def report(self) -> str:
        """One line for each drafter."""
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
    """Whatever computes in a thread while the interpreter ends is torn down in the middle, and the process with it."""
    for online in list(_running):
        if online._thread is not None and online._thread.is_alive():  # not so behind a fork
            online.close()


def _begin_behind_fork() -> None:
    for online in list(_all):
        online._begin_behind_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_behind_fork)


def _let_go(reference: "weakref.ref[OnlineDistillation]", module_id: int) -> None:
    """Nobody drafts with it any more."""
    online = reference()
    if online is not None:
        online._learners.pop(module_id, None)


def _guarded(learner: Learner, call: Callable[..., Any], *args: Any) -> None:
    """What one drafter does wrong ends learning for it alone."""
    try:
        call(*args)
    except LearningEndedError:
        raise
    except Exception as error:
        learner.give_up(error)


def _members(source: TreeCandidateGenerator) -> Iterator[TreeCandidateGenerator]:
    """All sources that draft for some request."""
    if not isinstance(source, RoutedCandidates):
        yield from source.stages
        return
    for item in source.sources:
        yield from _members(item)


def _learn(reference: "weakref.ref[OnlineDistillation]", changed: threading.Condition) -> None:
    """The thread that learns, as long as anybody can be learnt for."""
    with suppress(AttributeError, OSError):  # of this thread alone, where the system knows that
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    while True:
        online = reference()
        if online is None or online._is_closed:
            return
        due = [learner for learner in list(online._learners.values()) if learner.is_due]
        if not due:
            del online, due
            with changed:
                changed.wait(1.0)  # who refers to nothing is not told that nobody refers to it
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
    """Waits until there is capacity to learn with."""

    def __init__(self, online: OnlineDistillation, changed: threading.Condition):
        self.online, self.changed = online, changed

    def __call__(self) -> None:
        with self.changed:
            while not self.changed.wait_for(self._may_go_on, 1.0):
                pass  # a loop that is gone says nothing
        if self.online._is_closed:
            raise LearningEndedError

    def _may_go_on(self) -> bool:
        return self.online._is_closed or self.online._num_urging > 0 or self.online.is_idle
