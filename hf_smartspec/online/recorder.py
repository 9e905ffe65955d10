"""Makes samples of requests while they are served."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from ..candidates.committed import Committed
from ..decoding.learning import Recorder, Shown
from ..device import to_device
from ..sampling.top import likeliest_tokens
from .drafted import Branches, Drafted, rejected
from .samples import Sample

_LINES = 8  # that are looked at together on a CPU: what was computed of them is still in the cache


class _Top(NamedTuple):
    """The likeliest tokens (int32 `[n, k]`) and their probabilities (float16), on the target's device."""

    ids: torch.Tensor
    probs: torch.Tensor


class _Drafts(NamedTuple):
    """See `Drafted`; of one step."""

    is_asked: np.ndarray
    tokens: np.ndarray
    parents: np.ndarray
    roots: np.ndarray
    ids: torch.Tensor
    probs: torch.Tensor


def lines_of(shown: Shown) -> np.ndarray:
    """Of logits, those that a step's tokens were picked by, int64 `[n]`."""
    step, first = shown
    return np.append(0, step.path + 1)[: len(step.tokens)] + first


def _last(step: Committed, num_tokens: int) -> int:
    """The node that stands before the last of so many tokens; -1 for the text."""
    return int(step.path[num_tokens - 2]) if num_tokens > 1 else -1


def _is_drafted(step: Committed, num_tokens: int) -> bool:
    """Whether something was drafted in the place of the last of so many tokens: in those before it, something was."""
    return bool((step.tree.parents == _last(step, num_tokens)).any())


@dataclass(eq=False)
class _Course:
    """One request so far. Tensors lie on the target's device, since a transfer would wait for it."""

    prompt: np.ndarray
    is_greedy: bool
    encoded: np.ndarray | None = None
    tokens: list[np.ndarray] = field(default_factory=list)
    errors: list[np.ndarray] = field(default_factory=list)
    tops: list[_Top] = field(default_factory=list)
    drafts: list["_Drafts"] = field(default_factory=list)
    num_drafted: int = 0
    first: int = 0  # position of the first hidden state
    num_tokens: int = 0
    hidden: list[dict[int, torch.Tensor]] = field(default_factory=list)
    num_hidden: int = 0
    is_broken: bool = False  # something is missing in between

    def take_drafts(self, step: Committed, own: Branches, num_tokens: int, top: _Top) -> None:
        """Of a step in which so many tokens were committed."""
        tree = step.tree
        parents = np.where(own.parents >= 0, own.parents + self.num_drafted, -1)
        is_asked = np.ones(num_tokens, bool)
        is_asked[-1] = _is_drafted(step, num_tokens)
        self.drafts.append(_Drafts(is_asked, tree.tokens[own.nodes].astype(np.int32), parents, own.roots, *top))
        self.num_drafted += len(parents)

    def drafted(self) -> Drafted:
        return Drafted(
            np.concatenate([item.is_asked for item in self.drafts]),
            np.concatenate([item.tokens for item in self.drafts]),
            np.concatenate([item.parents for item in self.drafts]),
            np.concatenate([item.roots for item in self.drafts]),
            torch.cat([item.ids for item in self.drafts]).cpu(),
            torch.cat([item.probs for item in self.drafts]).cpu(),
        )

    def cut(self, start: int) -> None:
        """Lets go of hidden states from this position on."""
        num = max(start - self.first, 0)
        kept = {layer: torch.cat([item[layer] for item in self.hidden])[:num] for layer in self.hidden[0]}
        self.hidden, self.num_hidden = [kept], num
        self.first = min(self.first, start)


class SampleRecorder(Recorder):
    """
    Args:
        keep (`Callable`): Gets the samples.
        top_k (`int`): Tokens of the target's distributions that are kept.
        hidden_layers (sequence of `int`): Whose hidden states are kept; see `TreeCandidateGenerator`.
        keeps_drafts (`bool`): Also what was drafted and rejected, and what the target thought behind it.
        max_length (`int`, *optional*): Of samples, as `Sample.end` will have it: no more is kept meanwhile than that
            needs, of prompts and responses of any length.
    """

    def __init__(
        self,
        keep: Callable[[Sample], None],
        top_k: int,
        hidden_layers: Sequence[int] = (),
        max_length: int | None = None,
        keeps_drafts: bool = False,
    ):
        self._max_length, self._keeps_drafts = max_length, keeps_drafts
        self._keep, self._top_k, self.hidden_layers = keep, top_k, tuple(dict.fromkeys(hidden_layers))
        self._courses: dict[Hashable, _Course] = {}

    def start(
        self, request_id: Hashable, prompt: np.ndarray, is_greedy: bool, encoded: np.ndarray | None = None
    ) -> None:
        self._courses[request_id] = _Course(prompt, is_greedy, encoded)

    @torch.no_grad()
    def show(self, steps: Mapping[Hashable, Shown], logits: torch.Tensor | None) -> None:
        wanted = [(course, steps[name]) for name in steps if (course := self._wanting(name)) is not None]
        for course, _ in wanted:
            course.is_broken = True  # unless all that follows is done
        branches = [self._branches(course, shown.step) for course, shown in wanted]
        lines = [np.append(lines_of(shown), own.nodes + 1 + shown.first) for (_, shown), own in zip(wanted, branches)]
        for (course, (step, _)), own, top in zip(wanted, branches, self._tops(lines, logits)):
            is_broken = False
            if self.hidden_layers:
                is_broken = self._take_hidden(course, step)
            if len(step.tokens):
                if top is None:
                    continue
                num = len(top.ids) - len(own.nodes)
                if self._keeps_drafts:
                    course.take_drafts(step, own, num, _Top(top.ids[num:], top.probs[num:]))
                is_broken |= self._take_tokens(course, step, _Top(top.ids[:num], top.probs[:num]))
            course.is_broken = is_broken

    def _branches(self, course: _Course, step: Committed) -> Branches:
        """What was rejected in a step, as far as that is to be kept: no more tokens than of texts."""
        has_room = self._max_length is None or course.num_drafted < self._max_length
        if not (self._keeps_drafts and has_room and len(step.tokens) and len(step.tree)):
            return Branches(*np.zeros((3, 0), np.int64))
        return rejected(step.tree, step.path, course.num_tokens)

    def _wanting(self, request_id: Hashable) -> _Course | None:
        """The request's course, if there is more to keep of it."""
        course = self._courses.get(request_id)
        if course is None or course.is_broken:
            return None
        is_full = self._max_length is not None and course.num_tokens >= self._max_length - 1
        return None if is_full else course

    def _tops(self, lines: Sequence[np.ndarray], logits: torch.Tensor | None) -> Sequence[_Top | None]:
        """Of all requests at once: what is likeliest in these lines of logits."""
        sizes = list(map(len, lines))
        if logits is None or not sum(sizes):
            return [None] * len(lines)
        chosen = logits.index_select(0, to_device(np.concatenate(lines), logits.device))
        together = _LINES if chosen.device.type == "cpu" else len(chosen)
        parts = [likeliest_tokens(part.float(), self._top_k) for part in chosen.split(together)]
        ids = torch.cat([ids for ids, _ in parts]).to(torch.int32)
        probs = torch.cat([probs for _, probs in parts]).to(torch.float16)
        return [_Top(*pair) if len(pair[0]) else None for pair in zip(ids.split(sizes), probs.split(sizes))]

    def _take_tokens(self, course: _Course, step: Committed, top: _Top) -> bool:
        """Returns whether some are missing."""
        num = len(top.ids)
        course.tops.append(top)
        course.tokens.append(step.tokens[:num].copy())  # sources have it, too
        course.num_tokens += num
        errors = np.zeros(num, bool)
        if _is_drafted(step, num):
            errors[-1] = step.tree.child(_last(step, num), int(step.tokens[-1])) is None
        course.errors.append(errors)
        return num < len(step.tokens)

    def _take_hidden(self, course: _Course, step: Committed) -> bool:
        """Returns whether some are missing."""
        states = {layer: step.hidden_states[layer] for layer in self.hidden_layers if layer in step.hidden_states}
        num = len(next(iter(states.values()), ()))
        if not num:
            return False
        is_broken, end = False, course.first + course.num_hidden
        if step.start > end:  # what a prefix brought along was not run again
            is_broken = end > 0 or bool(course.tokens)
            course.first = step.start
        elif step.start < end:  # the text was run anew from there
            course.cut(step.start)
        if self._max_length is not None and step.start < len(course.prompt) - self._max_length:
            num_far = min(len(course.prompt) - self._max_length - step.start, num)  # further back than samples reach
            states = {layer: item[num_far:].clone() for layer, item in states.items()}
            num, course.first = num - num_far, step.start + num_far
        course.hidden.append(states)
        course.num_hidden += num
        return is_broken

    def stop(self, request_id: Hashable) -> None:
        course = self._courses.pop(request_id, None)
        if course is not None and course.tokens and not course.is_broken:
            sample = self._sample(course)
            is_whole = all(len(states) == sample.num_tokens - 1 for states in sample.hidden.values())
            if len(sample.prompt) and len(sample.hidden) == len(self.hidden_layers) and is_whole:
                self._keep(sample)

    def _sample(self, course: _Course) -> Sample:
        response = np.concatenate(course.tokens).astype(np.int32)
        layers = self.hidden_layers if course.hidden else ()
        hidden = {layer: torch.cat([item[layer] for item in course.hidden]).cpu() for layer in layers}
        num = len(course.prompt) - course.first + len(response) - 1  # what was dropped of the last step has states too
        return Sample(
            course.prompt[course.first :].astype(np.int32),
            response,
            torch.cat([ids for ids, _ in course.tops]).cpu(),
            torch.cat([probs for _, probs in course.tops]).cpu(),
            np.concatenate(course.errors),
            course.is_greedy,
            {layer: states[:num] for layer, states in hidden.items()},
            None if course.encoded is None else course.encoded.astype(np.int32),
            course.drafted().within(len(response)) if self._keeps_drafts else None,
        )
