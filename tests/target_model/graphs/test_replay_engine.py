"""An engine that replays texts again and again: forwards stay recorded, and nothing is left of earlier texts."""

from dataclasses import replace

import numpy as np
import pytest

from hf_smartspec import SmartSpecConfig
from hf_smartspec.commands.common.replaying import ReplayEngine
from hf_smartspec.goodput import NoSpeculation
from hf_smartspec.target_model.graphs import RUNS_UNTIL_RECORDED
from tests.models import VOCAB_SIZE, new_model

CONFIGS = {
    "none": SmartSpecConfig("none", policy=NoSpeculation()),
    "suffix": SmartSpecConfig("suffix", num_nodes=8),
}


@pytest.mark.parametrize(("name", "num_rows"), [("none", 8), ("suffix", 1)])
def test_later_rounds_replay_what_the_first_have_recorded(recorders, name, num_rows):
    model, rng = new_model("llama", eos_token_id=None), np.random.default_rng(0)
    prompts = list(rng.integers(3, VOCAB_SIZE, (num_rows, 16)))
    responses = [np.tile(part, 3) for part in rng.integers(3, VOCAB_SIZE, (num_rows, 7))]  # with something to draft
    engine = ReplayEngine(model, CONFIGS[name], num_rows, prompts, responses, end_id=-1)
    replays, counts = [], []
    for _ in range(RUNS_UNTIL_RECORDED + 2):
        assistant, before = engine.forget_texts(), replace(engine.statistics)
        num_replays = sum(item.num_replays for item in recorders)
        names = [engine.add_request(prompt, assistant=assistant, max_new_tokens=21) for prompt in prompts]
        with engine:
            found = [engine.get_result(name).generated_tokens for name in names]
        assert found == [response.tolist() for response in responses]
        replays.append(sum(item.num_replays for item in recorders) - num_replays)
        counts.append(engine.statistics - before)
    later = counts[RUNS_UNTIL_RECORDED:]
    assert replays[RUNS_UNTIL_RECORDED:] == [count.forwards for count in later], "no step is launched call by call"
    assert all(count.accepted_tokens <= counts[0].accepted_tokens + num_rows for count in later), "texts are forgotten"
    assert (later[0].accepted_tokens > 0) == (name == "suffix")
    assert all(count.generated_tokens == 21 * num_rows for count in counts)
