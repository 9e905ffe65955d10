"""Requests with all sorts of settings, and what each of them yields by itself."""

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from transformers import GenerationMixin, LogitsProcessorList, PreTrainedModel, StoppingCriteria

from hf_smartspec import Engine, SeededGumbelLogitsProcessor, SmartSpecConfig, SuffixTreeCandidates

from ..generate.helpers import BOS, VOCAB_SIZE

SETTINGS: list[dict[str, Any]] = [
    {},
    {"do_sample": True, "temperature": 0.8},
    {"do_sample": True, "top_k": 7, "top_p": 0.9},
    {"do_sample": True},
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 3},
    {"min_new_tokens": 6},
]
TIMEOUT = 60.0
_SAMPLING = ("do_sample", "temperature", "top_k", "top_p")
_PLAIN = bool | int | float | None  # values that a request is known by
_LARGEST = 1_000_000  # parameters of models whose weights are looked at, to tell whether their tokens are known
_known: dict[tuple[bytes, str], list[int]] = {}


@dataclass
class Asked:
    """A prompt and the arguments of its request."""

    prompt: list[int]
    settings: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None

    def alone(self, model) -> list[int]:
        """
        Return the tokens of plain `generate`, which samples through the reference processor. Tests ask the same of
        equal models, so each text is decoded once.
        """
        identity = _identity(model)
        if identity is None or not all(isinstance(value, _PLAIN) for value in self.settings.values()):
            return self._decoded(model)
        key = identity, repr((self.prompt, sorted(self.settings.items()), self.seed))
        if key not in _known:
            _known[key] = self._decoded(model)
        return _known[key].copy()

    def _decoded(self, model) -> list[int]:
        ids = torch.tensor([self.prompt])
        settings = dict(self.settings)
        if settings.get("do_sample"):
            settings["do_sample"] = False
            sampling = {name: settings.pop(name) for name in _SAMPLING if name in settings}
            settings["logits_processor"] = LogitsProcessorList(
                [*_warpers(model, sampling), SeededGumbelLogitsProcessor(self.seed)]
            )
        output = GenerationMixin.generate(model, ids, attention_mask=torch.ones_like(ids), **settings)
        begins = len(self.prompt)
        if model.config.is_encoder_decoder:  # its encoder reads the prompt, and its decoder has another one
            given = settings.get("decoder_input_ids", ids[:, :0])
            begins = given.shape[1] + int(given[0, :1].tolist() != output[0, :1].tolist())
        return output[0, begins:].tolist()

    @property
    def arguments(self) -> dict[str, Any]:
        return self.settings | ({"seed": self.seed} if self.seed is not None else {})


def _identity(model) -> bytes | None:
    """Digest of all that a model's tokens depend on; None where it is large, or has modules that are not its own."""
    if sum(parameter.numel() for parameter in model.parameters()) > _LARGEST:
        return None
    if not all(type(module).__module__.startswith(("torch.nn.", "transformers.")) for module in model.modules()):
        return None
    config = model.config
    settings = type(model), config._attn_implementation, config.to_dict(), model.generation_config.to_dict()
    digest = blake2b(repr(settings).encode(), digest_size=16)
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.cpu().flatten().view(torch.uint8).numpy().tobytes())
    return digest.digest()


def _warpers(model, sampling: dict[str, Any]) -> LogitsProcessorList:
    config, _ = model._prepare_generation_config(None, **(sampling | {"do_sample": True}))
    return model._get_logits_processor(config, device="cpu", logits_processor=LogitsProcessorList())


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


def check_all(engine: Engine, model, requests: list[Asked], expected: list[list[int]] | None = None) -> list:
    """Adds all requests and compares every output with the request by itself: what is expected, where that is known."""
    expected = [asked.alone(model) for asked in requests] if expected is None else expected
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


def change_weights_while_running(
    engine: Engine, prompt: list[int], max_new_tokens: int, other: PreTrainedModel
) -> None:
    """Give the model another one's weights in a pause: earlier tokens stay, later ones come from the new weights."""
    name = engine.add_request(prompt, max_new_tokens=max_new_tokens, eos_token_id=None, streaming=True)
    stream = engine.request_id_iter(name)
    next(stream)
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
