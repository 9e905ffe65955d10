"""The promise for all causal language models of transformers, behind the lengths at which they change their ways."""

import re
from pathlib import Path

import numpy as np
import pytest

from hf_smartspec import Engine

from .architectures import NAMES, REPRESENTATIVE, serve, small_model
from .conftest import WAYS
from .covering import IS_EXHAUSTIVE
from .models import RECURRENT, UNPADDED
from .serving.helpers import Asked, check_all, suffix

LENGTHS = 12, 5, 1, 14
# transformers' RecurrentGemma takes any forward of one token for a step of decoding: plain `generate`, the reference,
# begins a prompt of one token with the states that earlier texts have left in its modules.
FEWEST_TOKENS = {"recurrent_gemma": 2}
PAGE = Path(__file__).parents[1] / "docs" / "supported-models.md"


@pytest.mark.parametrize("name", NAMES if IS_EXHAUSTIVE else REPRESENTATIVE)
def test_every_causal_language_model_generates_the_plain_tokens(name, monkeypatch, record_property):
    served = serve(small_model(name), monkeypatch)
    record_property(WAYS, {name: list(served.routes.values())})
    assert not served.differences, served.differences
    if all(route.startswith("plain: ") for route in served.routes.values()):
        assert served.drafted == 0, "nothing is drafted where nothing can be verified"
    else:
        assert served.drafted > 0 and served.accepted > 0


@pytest.mark.parametrize("name", NAMES if IS_EXHAUSTIVE else ("deepseek_v32", "lfm2_moe", "qwen3_5_text"))
def test_engines_serve_every_causal_language_model(name):
    """More requests than run at once, prompts in pieces: packed, row by row, or without speculation."""
    model, rng, requests = small_model(name), np.random.default_rng(0), []
    for number, length in enumerate(LENGTHS):
        length = max(length, FEWEST_TOKENS.get(name, 1))
        settings = {"max_new_tokens": 14, "eos_token_id": None}
        samples = {"do_sample": True, "temperature": 0.8} if number % 2 else {}
        requests.append(Asked(rng.integers(3, 40, length).tolist(), settings | samples, number if samples else None))
    with Engine(model, suffix(), max_batch_size=3, max_prefill_tokens=5) as engine:
        check_all(engine, model, requests)
    assert engine.statistics.generated_tokens == 14 * len(LENGTHS)


@pytest.mark.skipif(not RECURRENT, reason="this release's layers with states are not known")
def test_the_page_has_the_hybrids_that_are_packed_here():
    rows = re.findall(
        r"^\|[^|]+\| ([a-z0-9_, ]+) \|[^|]+\| packed(?:, without padding)? \|$", PAGE.read_text(), re.MULTILINE
    )
    named = [name for row in rows for name in row.split(", ")]
    assert sorted(named) == sorted(name.removesuffix("_text") for name in RECURRENT | UNPADDED)
