"""Releases of transformers that nobody has tested: what a user is told, and what is done."""

import pytest
import torch
from packaging.version import Version
from transformers import GenerationMixin

import hf_smartspec
from hf_smartspec import Engine
from hf_smartspec.target_model import private
from hf_smartspec.target_model.model_state import state_of
from hf_smartspec.target_model.private import logger, private_function, private_value, release_warning
from hf_smartspec.target_model.support import capabilities as support

from ..cases import left_padded
from ..models import new_model
from ..sources import Oracle

INPUTS = left_padded([[3, 4, 5, 3, 4, 5, 3, 4], [6, 7, 6, 7, 6]]) | {"max_new_tokens": 12, "eos_token_id": None}


@pytest.fixture
def newer(monkeypatch):
    monkeypatch.setattr(private, "TRANSFORMERS", Version("5.99.1"))


@pytest.fixture(autouse=True)
def _warnings_anew():
    logger.warning_once.cache_clear()
    yield
    logger.warning_once.cache_clear()


def release_warnings(caplog):
    return [record.getMessage() for record in caplog.records if "transformers 5" in record.getMessage()]


@pytest.mark.parametrize("release, is_newer", [("5.20.2", 0), ("5.24.9", 0), ("5.25.0", 1), ("5.25.0.dev0", 1)])
def test_patches_of_tested_lines_are_tested(monkeypatch, release, is_newer):
    monkeypatch.setattr(private, "TRANSFORMERS", Version(release))
    assert private.is_newer() == bool(is_newer)
    assert bool(release_warning()) == bool(is_newer)


def test_the_installed_release_lacks_nothing():
    assert release_warning() is None


def test_calls_on_a_newer_release_warn_once_and_try_models_out(newer, caplog):
    model = new_model("llama")
    expected = model.generate(**INPUTS)
    with hf_smartspec.enabled(model):
        for _ in range(2):
            output = model.generate(**INPUTS, assistant=Oracle(expected.tolist()), return_dict_in_generate=True)
            assert torch.equal(output.sequences, expected) and output.statistics.accepted_tokens > 0
    (message,) = release_warnings(caplog)
    assert "5.99.1 is newer than 5.24" in message and "smartspec verify" in message
    assert state_of(model).obstacles == {(support.PackedForward, False): None, (support.PackedForward, True): None}


def test_engines_on_a_newer_release_warn_too(newer, caplog):
    with Engine(new_model("llama"), assistant="prompt_lookup") as engine:
        engine.generate([[3, 4, 5]], max_new_tokens=2)
    assert len(release_warnings(caplog)) == 1


def test_a_method_that_is_gone_is_named_with_what_it_serves(monkeypatch, caplog):
    monkeypatch.delattr(GenerationMixin, "_prefill")
    with hf_smartspec.enabled(model := new_model("llama")):
        model.generate(**INPUTS, assistant="prompt_lookup")
    (message,) = release_warnings(caplog)
    assert "prompts with images" in message and "`_prefill`" in message and "newer" not in message


def test_models_that_need_a_function_that_is_gone_decode_plainly_with_a_warning(newer, monkeypatch, caplog):
    monkeypatch.setattr(private, "_missing", {})
    absent = private_function("transformers.generation.candidate_generator", "_gone", "models that run row by row")
    monkeypatch.setattr("hf_smartspec.target_model.forward.rowwise.prepare_attention_mask", absent)
    model = new_model("bloom")
    expected = model.generate(**INPUTS)
    with hf_smartspec.enabled(model):
        assert torch.equal(model.generate(**INPUTS, assistant="prompt_lookup"), expected)
    assert "models that run row by row (`_gone`)" in release_warnings(caplog)[0]
    assert "Decoding without speculation: BloomForCausalLM cannot run several tokens at once" in caplog.text


def test_parts_that_are_gone_have_stand_ins(monkeypatch):
    monkeypatch.setattr(private, "_missing", {})
    assert private_value("transformers", "__version__", "", "nothing") == private.transformers.__version__
    assert private_value("transformers.no_such_module", "NAMES", ["cache"], "engines") == ["cache"]
    with pytest.raises(NotImplementedError, match=r"no `transformers._gone`, which images need"):
        private_function("transformers", "_gone", "images")()
    assert private._missing == {"NAMES": "engines", "_gone": "images"}
