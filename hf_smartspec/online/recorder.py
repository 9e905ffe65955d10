"""Makes samples of requests while they are served."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ..candidates.committed import Committed
from ..decoding.learning import Recorder
from .samples import Sample


@dataclass(eq=False)
class _Course:
    """One request so far. Tensors lie on the target's device, since a transfer would wait for it."""

    prompt: np.ndarray
    is_greedy: bool
    encoded: np.ndarray | None = None
    tokens: list[np.ndarray] = field(default_factory=list)
    errors: list[np.ndarray] = field(default_factory=list)
    tops: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    first: int = 0  # position of the first hidden state
    num_tokens: int = 0
    hidden: list[dict[int, torch.Tensor]] = field(default_factory=list)
    num_hidden: int = 0
    is_broken: bool = False  # something is missing in between

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
        max_length (`int`, *optional*): Of samples, as `Sample.end` will have it: no more is kept meanwhile than that
            needs, of prompts and responses of any length.
    """

    def __init__(
        self,
        keep: Callable[[Sample], None],
        top_k: int,
        hidden_layers: Sequence[int] = (),
        max_length: int | None = None,
    ):
        self._max_length = max_length
        self._keep, self._top_k, self.hidden_layers = keep, top_k, tuple(dict.fromkeys(hidden_layers))
        self._courses: dict[Hashable, _Course] = {}

    def start(
        self, request_id: Hashable, prompt: np.ndarray, is_greedy: bool, encoded: np.ndarray | None = None
    ) -> None:
        self._courses[request_id] = _Course(prompt, is_greedy, encoded)

    @torch.no_grad()
    def show(self, request_id: Hashable, step: Committed) -> None:
        course = self._courses.get(request_id)
        if course is None or course.is_broken:
            return
        if self._max_length is not None and course.num_tokens >= self._max_length - 1:
            return
        course.is_broken = True  # unless all that follows is done
        is_broken = False
        if self.hidden_layers:
            is_broken = self._take_hidden(course, step)
        if len(step.tokens):
            if step.scores is None:
                return
            is_broken |= self._take_tokens(course, step, step.scores)
        course.is_broken = is_broken

    def _take_tokens(self, course: _Course, step: Committed, scores: torch.Tensor) -> bool:
        """Returns whether some are missing."""
        num = min(len(step.tokens), 1 + len(step.path))
        if len(scores) > 1 + len(step.path):  # of all nodes
            scores = scores[[0, *(step.path + 1).tolist()]]
        logits = scores[:num].float()
        best = logits.topk(min(self._top_k, logits.shape[-1]), dim=-1)
        probs = (best.values - logits.logsumexp(dim=-1, keepdim=True)).exp()
        course.tops.append((best.indices.to(torch.int32), probs.to(torch.float16)))
        course.tokens.append(step.tokens[:num].copy())  # sources have it, too
        course.num_tokens += num
        errors = np.zeros(num, bool)
        last = step.path[num - 2] if num > 1 else -1
        errors[-1] = (
            bool((step.tree.parents == last).any()) and step.tree.child(int(last), int(step.tokens[-1])) is None
        )
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
        )
