"""Prompts that begin as the texts of requests that other sources drafted for: learned drafters have kept nothing."""

import logging

import pytest

from hf_smartspec import Engine, SmartSpecConfig
from hf_smartspec.candidates.heads.kinds import source_of
from hf_smartspec.goodput import Calibrator
from tests.generate.helpers import prompts, tiny_llama
from tests.models import RECURRENT, new_model

from .fitted import fitted_eagle, fitted_heads, fitted_speculator

GREEDY = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}


@pytest.mark.parametrize("fit", [fitted_heads, fitted_speculator, fitted_eagle])
@pytest.mark.parametrize("is_list", [False, True])
def test_texts_of_others(fit, is_list, caplog):
    target = tiny_llama(eos_token_id=None)
    texts = target.generate(**prompts([12] * 12), **GREEDY)
    source, other = (source_of(fit(target, texts), Calibrator(), None) for _ in range(2))
    first, second = texts[0, :12].tolist(), texts[0, 12:].tolist()
    with Engine(target, SmartSpecConfig("none", num_nodes=4), max_batch_size=2) as engine:
        engine.get_result(engine.add_request(first, **GREEDY))
        for assistant in (source, [other, source]) if is_list else (other, source):
            output = engine.get_result(engine.add_request(first, assistant=assistant, **GREEDY))
            assert output.generated_tokens == second and output.statistics.accepted_tokens > 0
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING], caplog.text


@pytest.mark.skipif(not RECURRENT, reason="this release's layers with states are not known")
def test_states_that_were_kept_where_others_texts_depart(caplog):
    target = new_model("lfm2")
    texts = target.generate(**prompts([12] * 12), **GREEDY)
    source, begin = source_of(fitted_eagle(target, texts), Calibrator(), None), 2 * texts[0].tolist()
    with Engine(target, SmartSpecConfig("none", num_nodes=4), max_batch_size=4) as engine:
        for end, assistant in ((3, "none"), (4, "none"), (5, source)):
            output = engine.get_result(engine.add_request([*begin, end], assistant=assistant, **GREEDY))
    assert output.statistics.drafted_tokens > 0
    own = [record for record in caplog.records if record.name.startswith("hf_smartspec")]
    assert not [record for record in own if record.levelno >= logging.WARNING], caplog.text
