"""Errors of other libraries with draft models in continuous batching: cached prefixes, missing memory."""

import pytest
import torch

from hf_smartspec import Engine

from ..generate.helpers import noisy_copy, tiny_llama
from .helpers import Asked, check_all

SETTINGS = {"max_new_tokens": 16, "eos_token_id": None}
PREFIX = list(range(3, 35))


@pytest.fixture
def model():
    return tiny_llama()


def test_a_draft_model_knows_the_prefix_that_its_target_need_not_read(model):
    """Elsewhere the draft's own cache lacked it, and what was not a number spread over the batch."""
    with Engine(model, noisy_copy(model), max_batch_size=4) as engine:
        check_all(engine, model, [Asked(PREFIX, SETTINGS)])
        drafted, accepted = engine.statistics.drafted_tokens, engine.statistics.accepted_tokens
        check_all(engine, model, [Asked([*PREFIX, *tail], SETTINGS) for tail in ([5, 6], [7], [5, 6, 9], [30] * 5)])
        drafted, accepted = engine.statistics.drafted_tokens - drafted, engine.statistics.accepted_tokens - accepted
        assert engine._memory.num_reused >= 4 * (len(PREFIX) - 1)
    assert accepted > drafted / 3, "drafts that know the text are often right"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_a_draft_model_without_memory_costs_its_drafts_only(model, error):
    """Elsewhere the server hung."""
    draft, calls = noisy_copy(model), []

    def fail(*_):
        calls.append(1)
        if len(calls) > 8:  # two of them measure its keys and values
            raise error("no memory")

    draft.model.layers[1].register_forward_pre_hook(fail)
    with Engine(model, draft, max_batch_size=4) as engine:
        check_all(engine, model, [Asked(PREFIX[:length], SETTINGS) for length in (9, 4, 20, 7, 12, 3)])
        assert len(calls) > 8 and engine.statistics.accepted_tokens > 0
