"""
Random requests that an engine serves: some come while others run, some are cancelled, some begin alike, some give way.
"""

import random
import threading
from typing import Any, NamedTuple
from unittest.mock import patch

from hf_smartspec import Engine, SmartSpecConfig
from hf_smartspec.serving import scheduler

from ..cases import Setting
from ..serving.helpers import TIMEOUT
from .drafters import Drafters
from .outcome import Outcome
from .requests import Way, arguments_of, random_policy, random_prompt, random_setting
from .targets import target

_COME, _CANCEL = 0.3, 0.06  # chances at a step of the engine: that a request comes, and that one is cancelled
_SAME = 0.7  # share of requests that go on from a text and are drafted for as that was


class Asked(NamedTuple):
    setting: Setting
    way: Way

    @property
    def name(self) -> str:
        return f"{self.setting.name}, {self.way}"


def serve(architecture: str, drafters: Drafters, rng: random.Random, outcome: Outcome) -> None:
    """Two waves of requests. The second goes on from the texts of the first, whose keys and values may be there."""
    beginning = [rng.randrange(3, 90) for _ in range(rng.randint(4, 40))]
    prompts = [random_prompt(architecture, beginning, rng) for _ in range(rng.randint(3, 8))]
    namespaces = rng.choice(("", "abc"))
    engine = Engine(
        target(architecture),
        SmartSpecConfig("none", policy=random_policy(rng)),
        max_batch_size=rng.choice((1, 2) if namespaces else (1, 2, 4, 8, 16)),  # kept texts give way to running ones
        max_prefill_tokens=rng.choice((3, 8, 20, 512)),
    )
    engine._memory.scheduler.lends_rows = rng.random() < 0.5
    with engine, patch.object(scheduler, "TURN", 2):  # those of other namespaces get theirs soon
        wave = _wave("first", architecture, [(prompt, None) for prompt in prompts], drafters, rng)
        texts = Wave(engine, wave, drafters, rng, outcome, namespaces).served()
        if rng.random() < 0.2:
            with engine.pause():  # as for a change of the target: texts are computed anew
                pass
        # Most are drafted for as before: who else drafts has kept nothing, so that nothing can be reused.
        later = [
            (text + random_prompt(architecture, [], rng)[:5], asked.way if rng.random() < _SAME else None)
            for text, asked in zip(texts, wave)
        ]
        wave = _wave("second", architecture, rng.sample(later, len(later)), drafters, rng)
        Wave(engine, wave, drafters, rng, outcome, namespaces).served()
        outcome.counts["reused"] += engine._runner.memory.num_reused
        outcome.counts["gave way"] += engine._runner.num_suspended


def _wave(
    name: str,
    architecture: str,
    prompts: list[tuple[list[int], Way | None]],
    drafters: Drafters,
    rng: random.Random,
) -> list[Asked]:
    """Requests for prompts, with who drafts for them where that is said."""
    wave = []
    for number, (prompt, way) in enumerate(prompts):
        setting = random_setting(f"{name} {number}", architecture, [prompt], rng)
        wave.append(Asked(setting, way or drafters.random_way(rng)))
    return wave


class Wave:
    """Requests that are served together. What happens meanwhile is drawn at every step, in the engine's thread."""

    def __init__(
        self,
        engine: Engine,
        wave: list[Asked],
        drafters: Drafters,
        rng: random.Random,
        outcome: Outcome,
        namespaces: str,
    ):
        self.engine, self.wave, self.drafters, self.outcome = engine, wave, drafters, outcome
        self._namespaces = namespaces or ("",)
        self.num_at_once, self._rng = rng.randint(1, len(wave)), random.Random(rng.random())
        self._names: list[str] = []  # of those that have come
        self._lock = threading.Lock()  # the engine's thread asks too: each request comes once

    def served(self) -> list[list[int]]:
        """Compares all outputs, and returns the texts."""
        loop = self.engine._runner.loop
        loop.step = lambda: self._step(loop)
        with self.engine.pause():
            for _ in range(self.num_at_once):
                self._ask(self.num_at_once)
        return [self._text(number, asked) for number, asked in enumerate(self.wave)]

    def _ask(self, most: int) -> None:
        """The next request, unless `most` have come."""
        with self._lock:
            if len(self._names) < most:
                setting, way = self.wave[len(self._names)]
                prompt, namespace = list(setting.prompts[0]), self._rng.choice(self._namespaces)
                assistant = SmartSpecConfig(self.drafters.assistant(way), namespace=namespace)
                self._names.append(self.engine.add_request(prompt, assistant=assistant, **arguments_of(setting)))

    def _step(self, loop: Any) -> Any:
        if len(self._names) < len(self.wave) and self._rng.random() < _COME:
            self._ask(len(self.wave))
        if self._rng.random() < _CANCEL:
            self.engine.cancel_request(self._rng.choice(self._names))
        return type(loop).step(loop)

    def _text(self, number: int, asked: Asked) -> list[int]:
        self._ask(number + 1)  # where all before it have been answered, nothing runs that could ask
        output = self.engine.get_result(self._names[number], timeout=TIMEOUT)
        prompt = list(asked.setting.prompts[0])
        if output is None:
            self.outcome.add_fault(f"{asked.name}: never answered")
            return prompt
        is_cancelled = output.finish_reason == "cancelled"
        if output.error is not None and not is_cancelled:
            self.outcome.add_fault(f"{asked.name}: {output.error}")
        expected = asked.setting.continuation(asked.setting.reference()[0, len(prompt) :].tolist())
        expected = expected[: len(output.generated_tokens)] if is_cancelled else expected
        self.outcome.counts["cancelled"] += is_cancelled
        self.outcome.compare(asked.setting, 0, expected, list(output.generated_tokens), asked.name)
        self.outcome.add_drafts(asked.way, 1, output.statistics)
        return prompt + list(output.generated_tokens)
