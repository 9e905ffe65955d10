"""Requests with all sorts of settings, and what each of them yields by itself."""

import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedModel, StoppingCriteria

from hf_smartspec import Engine, SeededGumbelLogitsProcessor, SmartSpecConfig, SuffixTreeCandidates

from ..generate.helpers import BOS, VOCAB_SIZE
from ..identity import identity, is_of_transformers
from ..models import PACKED

SETTINGS: list[dict[str, Any]] = [
    {},
    {"do_sample": True, "temperature": 0.8},
    {"do_sample": True, "top_k": 7, "top_p": 0.9},
    {"do_sample": True},
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 3},
    {"min_new_tokens": 6},
]
TIMEOUT = 600.0  # a process may get a minute of no processor on a busy machine
_SAMPLING = ("do_sample", "temperature", "top_k", "top_p")
_OF_ROWS = {*_SAMPLING, "eos_token_id", "min_new_tokens"}  # settings that read nothing of the prompt
_WITH_STATE = {"recurrent_gemma"}  # models whose tokens depend on what they ran before
_PLAIN = bool | int | float | None  # values that a request is known by
_known: dict[tuple, list[int]] = {}


@dataclass
class Asked:
    """A prompt and the arguments of its request."""

    prompt: list[int]
    settings: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None

    def alone(self, model) -> list[int]:
        """Return the tokens of plain `generate`, which samples through the reference processor."""
        return all_alone(model, [self])[0]

    @property
    def key(self) -> str | None:
        """All that the tokens depend on beside the model; None where that cannot be written down."""
        is_plain = all(isinstance(value, _PLAIN) for value in self.settings.values())
        return repr((self.prompt, sorted(self.settings.items()), self.seed)) if is_plain else None

    @property
    def arguments(self) -> dict[str, Any]:
        return self.settings | ({"seed": self.seed} if self.seed is not None else {})


def all_alone(model, requests: Sequence[Asked]) -> list[list[int]]:
    """
    Return the tokens that plain `generate` gives each request. Tests ask the same of equal models, so each text is
    decoded once. Requests that differ in prompts, seeds and lengths only are the rows of one call.
    """
    own = None if model.config.model_type in _WITH_STATE else identity(model)
    keys: list[Hashable] = [(own, asked.key) if own and asked.key else place for place, asked in enumerate(requests)]
    found = {key: _known[key] for key in keys if key in _known}
    calls: dict[Hashable, dict[Hashable, Asked]] = defaultdict(dict)
    for key, asked in zip(keys, requests):
        if key not in found:
            calls[_alike(model, asked) or key][key] = asked
    for call in calls.values():
        found.update(zip(call, _decoded(model, list(call.values()))))
    _known.update({key: tokens for key, tokens in found.items() if not isinstance(key, int)})
    return [found[key].copy() for key in keys]


def _alike(model, asked: Asked) -> str | None:
    """Settings of a call that the request may be one row of; None where padding or other rows could be seen."""
    settings = dict(asked.settings)
    is_cut = settings.pop("max_new_tokens", None) is not None
    is_blind = model.config.model_type in PACKED and model.dtype == torch.float32 and is_of_transformers(model)
    return repr(sorted(settings.items())) if is_cut and is_blind and settings.keys() <= _OF_ROWS else None


def _decoded(model, requests: Sequence[Asked]) -> list[list[int]]:
    """Tokens of the rows of one call, whose settings differ in `max_new_tokens` only."""
    width = max(len(asked.prompt) for asked in requests)
    ids = torch.tensor([[0] * (width - len(asked.prompt)) + asked.prompt for asked in requests])
    mask = torch.tensor([[0] * (width - len(asked.prompt)) + [1] * len(asked.prompt) for asked in requests])
    settings = dict(requests[0].settings)
    if len(requests) > 1:
        settings["max_new_tokens"] = max(asked.settings["max_new_tokens"] for asked in requests)
    ends = _prepared(model, settings).eos_token_id
    if settings.get("do_sample"):
        settings["do_sample"] = False
        sampling = {name: settings.pop(name) for name in _SAMPLING if name in settings}
        noise = SeededGumbelLogitsProcessor([asked.seed for asked in requests])
        settings["logits_processor"] = LogitsProcessorList([*_warpers(model, sampling), noise])
    output = GenerationMixin.generate(model, ids, attention_mask=mask, **settings)
    begins = width
    if model.config.is_encoder_decoder:  # its encoder reads the prompt, and its decoder has another one
        given = settings.get("decoder_input_ids", ids[:, :0])
        begins = given.shape[1] + int(given[0, :1].tolist() != output[0, :1].tolist())
    rows = output[:, begins:].tolist()
    if len(rows) > 1:  # each ends where it would by itself
        ends = [] if ends is None else [ends] if isinstance(ends, int) else ends
        for row, asked in zip(rows, requests):
            length = next((place for place, token in enumerate(row, 1) if token in ends), len(row))
            del row[min(length, asked.settings["max_new_tokens"]) :]
    return rows


def _prepared(model, settings: dict[str, Any]) -> GenerationConfig:
    return model._prepare_generation_config(None, **settings)[0]


def _warpers(model, sampling: dict[str, Any]) -> LogitsProcessorList:
    return model._get_logits_processor(
        _prepared(model, sampling | {"do_sample": True}), device="cpu", logits_processor=LogitsProcessorList()
    )


def random_requests(count: int, seed: int = 0, longest: int = 40, max_new_tokens: int = 24) -> list[Asked]:
    """Prompts of all lengths, some of which begin alike, under all settings."""
    rng = np.random.default_rng(seed)
    common = rng.integers(BOS + 1, VOCAB_SIZE, 20).tolist()
    requests = []
    for index in range(count):
        own = rng.integers(BOS + 1, VOCAB_SIZE, rng.integers(1, longest)).tolist()
        settings = SETTINGS[index % len(SETTINGS)] | {"max_new_tokens": int(rng.integers(1, max_new_tokens))}
        seed_of = int(rng.integers(1000)) if settings.get("do_sample") else None
        requests.append(Asked((common if index % 3 == 0 else []) + own, settings, seed_of))
    return requests


def suffix() -> SuffixTreeCandidates:
    """Drafts much, since little is known."""
    return SuffixTreeCandidates(min_probability=0.02, max_bytes=2**22)


@contextmanager
def all_at_once(engine: Engine) -> Iterator[None]:
    """
    Let the engine wait between two steps while requests are added or cancelled, so that it learns of all of them before
    the same step. A pause would do that, too, but forget kept texts.
    """
    with engine._runner._changed:
        yield


def wait_once(engine: Engine, until: Callable[[], Any] | None = None) -> threading.Event:
    """
    Let the engine wait once, when all running requests have tokens, until it is asked for something else (a request, a
    cancellation, a pause, its end), or for what `until` says: on a slow machine, all that runs might end before that.
    Return what is set as soon as it waits. Nothing is to be asked earlier.
    """
    runner, step, waits = engine._runner, engine._runner.loop.step, threading.Event()

    def is_asked() -> bool:
        return bool(runner._inbox or runner._cancelled or runner._num_pauses)

    def is_over() -> bool:
        return runner._is_stopping or bool((until or is_asked)())

    def waiting():
        if not waits.is_set() and all(request.num_valid for request in runner.loop.running):
            with runner._changed:  # whose waiters are told of all these
                waits.set()
                assert runner._changed.wait_for(is_over, TIMEOUT), "nobody has asked for anything"
        return step()

    runner.loop.step = waiting
    return waits


def check_all(engine: Engine, model, requests: list[Asked], expected: list[list[int]] | None = None) -> list:
    """Adds all requests at once, and compares every output with `expected`, or with the request by itself."""
    expected = all_alone(model, requests) if expected is None else expected
    with all_at_once(engine):
        names = [engine.add_request(asked.prompt, **asked.arguments) for asked in requests]
    outputs = [engine.get_result(name, timeout=TIMEOUT) for name in names]
    for asked, output, tokens in zip(requests, outputs, expected):
        assert output is not None and output.error is None
        assert output.generated_tokens == tokens, asked
        assert output.prompt_ids == asked.prompt
    return outputs


class StopsAt(StoppingCriteria):
    """Keeps what it was called with."""

    def __init__(self, length: int):
        self.lengths, self.length = [], length

    def __call__(self, input_ids, scores, **kwargs):
        self.lengths.append(input_ids.shape[1])
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


class Holds(StoppingCriteria):
    """Keeps a request where it is until it is let go, at the end of a `with` block at the latest."""

    def __init__(self):
        self.arrived, self.may_go = threading.Event(), threading.Event()

    def __call__(self, input_ids, scores, **kwargs):
        self.arrived.set()
        assert self.may_go.wait(TIMEOUT)
        return torch.zeros(len(input_ids), dtype=torch.bool)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.may_go.set()


def change_weights_while_running(
    engine: Engine, prompt: list[int], max_new_tokens: int, other: PreTrainedModel
) -> None:
    """Give the model another one's weights in a pause: earlier tokens stay, later ones come from the new weights."""
    waits = wait_once(engine)
    name = engine.add_request(prompt, max_new_tokens=max_new_tokens, eos_token_id=None, streaming=True)
    stream = engine.request_id_iter(name)
    assert waits.wait(TIMEOUT)
    with engine.pause():
        engine.model.load_state_dict(other.state_dict())
        request = next(iter(engine._runner.loop.calls)).requests[0]
        known = request.prompt.tolist() + request.tokens
    *_, last = stream
    num_left = len(prompt) + max_new_tokens - len(known)
    assert num_left > 0, "it ended before the pause"
    asked = Asked(known, {"max_new_tokens": num_left, "eos_token_id": None})
    assert last.prompt_ids + last.generated_tokens == known + asked.alone(engine.model)


def of(namespace: str, source="none", **options) -> SmartSpecConfig:
    return SmartSpecConfig(source, namespace=namespace, **options)
