"""Recorded responses: the target runs as it would without, and picks what was recorded."""

import numpy as np

from hf_smartspec.commands.common.replaying import ReplayEngine
from hf_smartspec.prepare.config import SmartSpecConfig
from hf_smartspec.target_model.written.decoder import WrittenDecoder
from tests.models import VOCAB_SIZE, new_model


def test_an_engine_replays_at_the_cost_of_the_written_out_decoder(monkeypatch):
    calls, compute = [], WrittenDecoder.__call__

    def counted(*args):
        calls.append(args)
        return compute(*args)

    model, rng = new_model("llama", eos_token_id=None), np.random.default_rng(0)
    prompts, responses = (list(rng.integers(3, VOCAB_SIZE, (2, length))) for length in (5, 9))
    with ReplayEngine(model, SmartSpecConfig("none"), 2, prompts, responses, end_id=2) as engine:
        monkeypatch.setattr(WrittenDecoder, "__call__", counted)
        names = engine.add_requests(prompts, max_new_tokens=9)
        outputs = {name: engine.get_result(name).generated_tokens for name in names}
        assert len(calls) == engine.statistics.forwards >= 9
    assert [outputs[name] for name in names] == [response.tolist() for response in responses]
