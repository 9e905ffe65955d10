"""One target, several drafters: each request goes to one of them."""

import time
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import nn
from transformers import PreTrainedTokenizerBase

from ....drafts.price import LevelPrice
from ....drafts.tree import DraftTree
from ....log import get_logger
from ...base import TreeCandidateGenerator, adopt, check_needs, pass_on, proposals_of
from ...committed import HIDDEN_STATES, Committed
from ...request import SourceRequest
from .bandit import DrafterBandit, Outcome
from .classifier import TextClassifier
from .features import Text
from .lanes import Lane, RequestLog
from .routers import predictor_of, readable

logger = get_logger(__name__)


class RoutedCandidates(TreeCandidateGenerator):
    """
    Several drafters of one target, each for texts of its kind (Online Speculative Decoding, sections 4.3 and 5.3). A
    request goes to one drafter when it begins:

    1. Its `tag` (`SmartSpecConfig(tag=...)`, `Engine.add_request(tag=...)`), or else the `router`, names its kind of
       text.
    2. If a drafter has this name, or `labels` maps the kind to a drafter, this drafter serves it.
    3. For any other kind, or none, a bandit chooses: the drafter with the highest measured goodput on this kind of
       text, or on texts that resemble this one, found out by serving (see `DrafterBandit`).

    Each drafter is asked for all of its rows in one call, and what its drafts cost and are worth is learnt by itself.

    Args:
        drafters (mapping of `str` to anything that `assistant=` may be): A source, a draft model, learned heads, a
            folder or hub id, a preset's name, or a list of these. All are loaded at the first use.
        router (*optional*): A function from a prompt to a drafter's name, another label or None; a text-classification
            pipeline of transformers; or a `TextClassifier`, which learns from the tags of those requests that have one.
            Where it fails, the bandit chooses.
        labels (mapping of `str` to `str`, *optional*): Drafters of further tags and labels.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The target's. With it, the `router` reads prompts as text,
            else as token ids (int64 `[length]`); of long prompts, the first and the last 512 tokens.
        half_life (`float`): See `DrafterBandit`.
        seed (`int`): Seed of the bandit's draws. Outputs do not depend on it, speed does.
        clock (`Callable`): Seconds, by which goodput is measured.

    Example:

        >>> drafters = {"code": "./draft-code", "chat": "./draft-chat"}
        >>> routed = RoutedCandidates(drafters, TextClassifier(), tokenizer=tokenizer)
        >>> model.generate(**inputs, assistant=SmartSpecConfig(routed, tag="code"))

    Raises:
        ValueError, TypeError: for names, labels or a router that cannot be.
    """

    def __init__(
        self,
        drafters: Mapping[str, Any],
        router: Any = None,
        labels: Mapping[str, str] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        half_life: float = 200.0,
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.drafters = _checked(drafters)
        self.labels = dict(labels or {})
        if unknown := sorted(set(self.labels.values()) - set(self.drafters)):
            raise ValueError(f"`labels` names {unknown}, and `drafters` are {list(self.drafters)}.")
        if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise TypeError(f"`tokenizer` must be a tokenizer of transformers, got {type(tokenizer).__name__}.")
        self.tokenizer, self.router, self._predict = tokenizer, router, predictor_of(router, tokenizer)
        self.bandit = DrafterBandit(list(self.drafters), half_life, seed)
        self._log = RequestLog(clock, self._learn)
        self._outcomes: dict[str, RouteStatistics] = {name: RouteStatistics() for name in self.drafters}
        self._lanes: dict[str, Lanes] = {}
        self._serving: dict[Hashable, TreeCandidateGenerator] = {}  # requests that began without `choose`
        self._settings: Any = None
        self._target: weakref.ref[nn.Module] | None = None
        if all(isinstance(item, TreeCandidateGenerator) for item in self.drafters.values()):
            self._take(self.drafters)

    # Preparing

    def prepare(self, target: nn.Module, settings: Hashable, make: Callable[[Any], TreeCandidateGenerator]) -> None:
        """
        Make sources of the drafters, once for a target.

        Args:
            settings (`Hashable`): Settings that the sources depend on; if these change, the sources are made anew.
            make (`Callable`): Makes a source of a value of `drafters`.

        Raises:
            ValueError: for a drafter that cannot draft for the target, or while requests of another one run.
        """
        if self._target is not None and self._target() is target and self._settings == settings:
            return
        if len(self._log):
            raise ValueError(f"{self.name} drafts for another target, or in another way, at present: make a new one.")
        self._take({name: make(item) for name, item in self.drafters.items()})
        self._target, self._settings = weakref.ref(target), settings

    def _take(self, sources: Mapping[str, TreeCandidateGenerator]) -> None:
        for source in sources.values():
            for stage in source.stages:
                check_needs(stage)
        self._lanes = {name: Lanes(source, self._log, name) for name, source in sources.items()}
        adopt(self, list(sources.values()))
        self.samples = all(getattr(source, "samples", False) for source in sources.values())

    @property
    def sources(self) -> list[TreeCandidateGenerator]:
        """The drafters as sources, in order; empty before they are prepared for a target."""
        return [lanes.source for lanes in self._lanes.values()]

    @property
    def name(self) -> str:
        return f"{type(self).__name__}({', '.join(self.drafters)})"

    def warm_up(self) -> None:
        """Let every drafter compile what it compiles at its first use."""
        for source in self.sources:
            if hasattr(source, "warm_up"):
                source.warm_up()

    # Routing

    def choose(self, requests: Sequence[SourceRequest]) -> list[TreeCandidateGenerator]:
        if not self._lanes:
            raise ValueError(f"{self.name} must be an `assistant=` before it drafts: its drafters are loaded then.")
        chosen: list[TreeCandidateGenerator] = []
        texts = [self._read(request.subject) for request in requests]
        kinds = self._kinds(texts, [request.tag for request in requests])
        for request, text, kind in zip(requests, texts, kinds):
            sketch = self.bandit.neighbours.sketch(text) if len(self._lanes) > 1 else None
            drafter = self.labels.get(kind, kind)
            if drafter not in self._lanes:
                drafter = self.bandit.choose(kind, sketch)
            self._log.begin(request.request_id, drafter, kind, sketch)
            chosen.append(self._lanes[drafter])
        return chosen

    def _read(self, prompt: np.ndarray) -> Text:
        try:
            return readable(prompt, self.tokenizer)
        except Exception as error:
            logger.warning_once(
                f"The tokenizer of {self.name} cannot read a prompt, of which nothing is known: {error!r}"
            )
            return ""

    def _kinds(self, texts: Sequence[Text], tags: Sequence[str | None]) -> list[str]:
        """Return the kind of each text; "" where it is unknown."""
        if self._predict is None:
            return [tag or "" for tag in tags]
        unknown = [row for row, tag in enumerate(tags) if not tag]
        found = dict(zip(unknown, self._predicted([texts[row] for row in unknown])))
        if isinstance(self.router, TextClassifier):
            known = [(text, tag) for text, tag in zip(texts, tags) if tag]
            self.router.learn([text for text, _ in known], [tag for _, tag in known])
        return [tag or found.get(row) or "" for row, tag in enumerate(tags)]

    def _predicted(self, texts: Sequence[Text]) -> Sequence[str | None]:
        assert self._predict is not None
        try:
            labels = self._predict(texts) if texts else []
            if len(labels) == len(texts) and all(label is None or isinstance(label, str) for label in labels):
                return labels
            raise TypeError(f"it must say a string or None for each of {len(texts)} prompts, and said {labels!r}")
        except Exception as error:
            logger.warning_once(f"The router of {self.name} failed, and what is known of drafters decides: {error!r}")
            return [None] * len(texts)

    def _learn(self, outcome: Outcome) -> None:
        self.bandit.update(outcome)
        self._outcomes[outcome.drafter] = self._outcomes[outcome.drafter].plus(outcome)

    # What is known

    def statistics(self) -> dict[str, "RouteStatistics"]:
        """Return sums over the requests that have ended, by drafter."""
        return dict(self._outcomes)

    def save(self, path: str | Path) -> None:
        """Write what the bandit has learnt (`.npz`), whole or not at all; a `TextClassifier` is saved by itself."""
        self.bandit.save(path)

    def load(self, path: str | Path) -> None:
        """
        Continue from a file that `save` has written, by the names of drafters.

        Raises:
            ValueError: if it is no such file, or has none of these drafters.
        """
        self.bandit.load(path)

    def bytes_per_token(self) -> int:
        """Return the most of one drafter: every request has one."""
        return max(lanes.source.bytes_per_token() for lanes in self._lanes.values())

    def bytes_per_request(self) -> int:
        return max(lanes.source.bytes_per_request() for lanes in self._lanes.values())

    # Callers without `choose` (transformers' own loop, fused sources) make these calls; they are forwarded.

    def begin(self, request: SourceRequest) -> int | None:
        lanes = self._serving[request.request_id] = self.choose([request])[0]
        num_reused = lanes.begin(request)
        return num_reused if HIDDEN_STATES in lanes.needs else request.num_cached

    def propose(
        self, request_ids: Sequence[Hashable], max_nodes: Sequence[int], price: LevelPrice | None = None
    ) -> list[DraftTree]:
        trees = [DraftTree.empty()] * len(request_ids)
        rows: dict[TreeCandidateGenerator, list[int]] = {}
        for row, name in enumerate(request_ids):
            rows.setdefault(self._serving[name], []).append(row)
        for lanes, own in rows.items():
            found = proposals_of(lanes, [request_ids[row] for row in own], [max_nodes[row] for row in own], price)
            for row, tree in zip(own, found):
                trees[row] = tree
        return trees

    def drafted_by(self, request_id: Hashable, tree: DraftTree) -> list[str]:
        return self._serving[request_id].drafted_by(request_id, tree)

    def observe(self, request_id: Hashable, tokens: np.ndarray | Committed) -> None:
        pass_on(self._serving[request_id], request_id, Committed.of(tokens))

    def stop(self, request_id: Hashable) -> None:
        lanes = self._serving.pop(request_id, None)
        if lanes is not None:
            lanes.stop(request_id)


class Lanes(Lane):
    """A drafter for the requests that go to it, stage by stage where it has several."""

    def __init__(self, source: TreeCandidateGenerator, log: RequestLog, route: str):
        super().__init__(source, log, route)
        is_one = list(source.stages) == [source]
        self._stages = [self] if is_one else [Lane(stage, log, route) for stage in source.stages]

    @property
    def stages(self) -> Sequence[TreeCandidateGenerator]:
        return self._stages


class RouteStatistics(NamedTuple):
    """
    Sums over the requests that one drafter has served.

    Args:
        requests, tokens, steps (`int`): Tokens committed after the step that ran the prompt, and the number of their
            steps.
        seconds_draft, seconds_rest (`float`): In its calls, and in all else in these steps but other drafters; where
            requests run together, counted for each.
    """

    requests: int = 0
    tokens: int = 0
    steps: int = 0
    seconds_draft: float = 0.0
    seconds_rest: float = 0.0

    def plus(self, outcome: Outcome) -> "RouteStatistics":
        return RouteStatistics(
            self.requests + 1,
            self.tokens + outcome.tokens,
            self.steps + outcome.steps,
            self.seconds_draft + outcome.drafting,
            self.seconds_rest + outcome.rest,
        )

    @property
    def mean_accepted_length(self) -> float:
        """Tokens per step."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def goodput(self) -> float:
        """Tokens per second of a request."""
        seconds = self.seconds_draft + self.seconds_rest
        return self.tokens / seconds if seconds else 0.0


def _checked(drafters: Any) -> dict[str, Any]:
    if not isinstance(drafters, Mapping):
        raise TypeError(f"`drafters` must be a mapping of names to drafters, got {type(drafters).__name__}.")
    if not drafters:
        raise ValueError("`drafters` must name at least one.")
    for name, item in drafters.items():
        if not isinstance(name, str) or not name:
            raise TypeError(f"Names of drafters must be strings, got {name!r}.")
        if isinstance(item, RoutedCandidates):
            raise ValueError(f"The drafter {name!r} is a RoutedCandidates itself: name its drafters here.")
    return dict(drafters)
