"""Prompts that begin as the texts of requests that other sources drafted for: learned drafters have kept nothing."""

import logging

import pytest

from hf_smartspec import Engine, SmartSpecConfig
from hf_smartspec.candidates.heads.kinds import source_of
from hf_smartspec.goodput import Calibrator
from tests.generate.helpers import prompts, tiny_llama

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
