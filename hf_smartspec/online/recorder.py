"""Recording of samples for training while requests are served."""

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

_LINES = 8  # lines of logits that a CPU reads at once: intermediate results stay in its cache


class _Top(NamedTuple):
    """The likeliest tokens (int32 `[n, k]`) and their probabilities, on the target's device; see `Sample`."""

    ids: torch.Tensor
    probs: torch.Tensor


class _Drafts(NamedTuple):
    """Rejected drafts of one step; fields are as in `Drafted`."""

    is_asked: np.ndarray
    tokens: np.ndarray
    parents: np.ndarray
    roots: np.ndarray
    ids: torch.Tensor
    probs: torch.Tensor


def lines_of(shown: Shown) -> np.ndarray:
    """Return the lines of logits from which a step's tokens were picked, int64 `[n]`."""
    step, first = shown
    return np.append(0, step.path + 1)[: len(step.tokens)] + first


def _last(step: Committed, num_tokens: int) -> int:
    """Return the node before the last of `num_tokens` committed tokens; -1 if the text before the step is."""
    return int(step.path[num_tokens - 2]) if num_tokens > 1 else -1


def _is_drafted(step: Committed, num_tokens: int) -> bool:
    """Return whether the draft has nodes in the place of the last of `num_tokens` tokens, as it has in all before."""
    return bool((step.tree.parents == _last(step, num_tokens)).any())


@dataclass(eq=False)
class _Recording:
    """A running request as recorded so far. Tensors stay on the target's device, since a transfer would wait for it."""

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
    is_broken: bool = False  # tokens or states are missing in between

    def take_drafts(self, step: Committed, own: Branches, num_tokens: int, top: _Top) -> None:
        """Add the rejected drafts `own` of a step in which `num_tokens` tokens were committed."""
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
        """Drop hidden states from position `start` on."""
        num = max(start - self.first, 0)
        kept = {layer: torch.cat([item[layer] for item in self.hidden])[:num] for layer in self.hidden[0]}
        self.hidden, self.num_hidden = [kept], num
        self.first = min(self.first, start)


class SampleRecorder(Recorder):
    """
    Makes a `Sample` of each request.

    Args:
        keep (`Callable`): Called with each sample.
        top_k (`int`, *optional*): Number of likeliest tokens that are kept of each of the target's distributions; with
            None, all.
        hidden_layers (sequence of `int`): Layers whose hidden states are kept; see `TreeCandidateGenerator`.
        keeps_drafts (`bool`): Whether to keep rejected drafts, and the target's distributions after them.
        max_length (`int`, *optional*): Length that `Sample.end` cuts samples to. No more than it needs is kept of
            longer prompts and responses while they are recorded.
    """

    def __init__(
        self,
        keep: Callable[[Sample], None],
        top_k: int | None,
        hidden_layers: Sequence[int] = (),
        max_length: int | None = None,
        keeps_drafts: bool = False,
    ):
        self._max_length, self._keeps_drafts = max_length, keeps_drafts
        self._keep, self._top_k, self.hidden_layers = keep, top_k, tuple(dict.fromkeys(hidden_layers))
        self._recordings: dict[Hashable, _Recording] = {}

    def start(
        self, request_id: Hashable, prompt: np.ndarray, is_greedy: bool, encoded: np.ndarray | None = None
    ) -> None:
        self._recordings[request_id] = _Recording(prompt, is_greedy, encoded)

    @torch.no_grad()
    def show(self, steps: Mapping[Hashable, Shown], logits: torch.Tensor | None) -> None:
        wanted = [(recording, steps[name]) for name in steps if (recording := self._unfinished(name)) is not None]
        for recording, _ in wanted:
            recording.is_broken = True  # until the step is recorded as a whole
        branches = [self._branches(recording, shown.step) for recording, shown in wanted]
        lines = [np.append(lines_of(shown), own.nodes + 1 + shown.first) for (_, shown), own in zip(wanted, branches)]
        for (recording, (step, _)), own, top in zip(wanted, branches, self._tops(lines, logits)):
            is_broken = False
            if self.hidden_layers:
                is_broken = self._take_hidden(recording, step)
            if len(step.tokens):
                if top is None:
                    continue
                num = len(top.ids) - len(own.nodes)
                if self._keeps_drafts:
                    recording.take_drafts(step, own, num, _Top(top.ids[num:], top.probs[num:]))
                is_broken |= self._take_tokens(recording, step, _Top(top.ids[:num], top.probs[:num]))
            recording.is_broken = is_broken

    def _branches(self, recording: _Recording, step: Committed) -> Branches:
        """Return the rejected drafts of a step; none where as many are kept already as a sample has tokens."""
        has_room = self._max_length is None or recording.num_drafted < self._max_length
        if not (self._keeps_drafts and has_room and len(step.tokens) and len(step.tree)):
            return Branches(*np.zeros((3, 0), np.int64))
        return rejected(step.tree, step.path, recording.num_tokens)

    def _unfinished(self, request_id: Hashable) -> _Recording | None:
        """Return the request's recording, unless it is broken or has all tokens that a sample may have."""
        recording = self._recordings.get(request_id)
        if recording is None or recording.is_broken:
            return None
        is_full = self._max_length is not None and recording.num_tokens >= self._max_length - 1
        return None if is_full else recording

    def _tops(self, lines: Sequence[np.ndarray], logits: torch.Tensor | None) -> Sequence[_Top | None]:
        """Return the likeliest tokens in each request's lines of logits, found for all at once; None without lines."""
        sizes = list(map(len, lines))
        if logits is None or not sum(sizes):
            return [None] * len(lines)
        chosen = logits.index_select(0, to_device(np.concatenate(lines), logits.device))
        if self._top_k is None:
            all_ids = torch.arange(chosen.shape[1], dtype=torch.int32, device=chosen.device).expand(chosen.shape)
            whole = zip(all_ids.split(sizes), chosen.float().softmax(dim=-1).split(sizes))
            return [_Top(*pair) if len(pair[0]) else None for pair in whole]
        together = _LINES if chosen.device.type == "cpu" else len(chosen)
        parts = [likeliest_tokens(part.float(), self._top_k) for part in chosen.split(together)]
        ids = torch.cat([ids for ids, _ in parts]).to(torch.int32)
        probs = torch.cat([probs for _, probs in parts]).to(torch.float16)
        return [_Top(*pair) if len(pair[0]) else None for pair in zip(ids.split(sizes), probs.split(sizes))]

    def _take_tokens(self, recording: _Recording, step: Committed, top: _Top) -> bool:
        """Record a step's tokens; return whether some are missing."""
        num = len(top.ids)
        recording.tops.append(top)
        recording.tokens.append(step.tokens[:num].copy())  # sources get the same array
        recording.num_tokens += num
        errors = np.zeros(num, bool)
        if _is_drafted(step, num):
            errors[-1] = step.tree.child(_last(step, num), int(step.tokens[-1])) is None
        recording.errors.append(errors)
        return num < len(step.tokens)

    def _take_hidden(self, recording: _Recording, step: Committed) -> bool:
        """Record a step's hidden states; return whether some are missing."""
        states = {layer: step.hidden_states[layer] for layer in self.hidden_layers if layer in step.hidden_states}
        num = len(next(iter(states.values()), ()))
        if not num:
            return False
        is_broken, end = False, recording.first + recording.num_hidden
        if step.start > end:  # a reused prefix was not run again
            is_broken = end > 0 or bool(recording.tokens)
            recording.first = step.start
        elif step.start < end:  # the text was run again from there
            recording.cut(step.start)
        if self._max_length is not None and step.start < len(recording.prompt) - self._max_length:
            # States further back than samples reach are not kept.
            num_far = min(len(recording.prompt) - self._max_length - step.start, num)
            states = {layer: item[num_far:].clone() for layer, item in states.items()}
            num, recording.first = num - num_far, step.start + num_far
        recording.hidden.append(states)
        recording.num_hidden += num
        return is_broken

    def stop(self, request_id: Hashable) -> None:
        recording = self._recordings.pop(request_id, None)
        if recording is not None and recording.tokens and not recording.is_broken:
            sample = self._sample(recording)
            is_whole = all(len(states) == sample.num_tokens - 1 for states in sample.hidden.values())
            if len(sample.prompt) and len(sample.hidden) == len(self.hidden_layers) and is_whole:
                self._keep(sample)

    def _sample(self, recording: _Recording) -> Sample:
        response = np.concatenate(recording.tokens).astype(np.int32)
        layers = self.hidden_layers if recording.hidden else ()
        hidden = {layer: torch.cat([item[layer] for item in recording.hidden]).cpu() for layer in layers}
        # Tokens that were dropped from the last step have states, too.
        num = len(recording.prompt) - recording.first + len(response) - 1
        return Sample(
            recording.prompt[recording.first :].astype(np.int32),
            response,
            torch.cat([ids for ids, _ in recording.tops]).cpu(),
            torch.cat([probs for _, probs in recording.tops]).cpu(),
            np.concatenate(recording.errors),
            recording.is_greedy,
            {layer: states[:num] for layer, states in hidden.items()},
            None if recording.encoded is None else recording.encoded.astype(np.int32),
            recording.drafted().within(len(response)) if self._keeps_drafts else None,
        )
