"""How a call is served is decided once, before anything runs."""

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import BaseStreamer, StoppingCriteria

import hf_smartspec
from hf_smartspec import Engine
from hf_smartspec.prepare import call as call_module
from hf_smartspec.prepare.route import _PACKED_KWARGS, Route, route_of
from hf_smartspec.target_model.compat import CACHE

from ..generate.helpers import Oracle, check_same, prompts, set_special_tokens, tiny_llama
from ..models import RECURRENT, new_model

RAGGED = prompts([5, 9, 2])


@pytest.fixture
def asked(monkeypatch):
    """The routes that calls were given, one per question."""
    answers: list[Route] = []

    def spy(*args):
        answers.append(route_of(*args))
        return answers[-1]

    monkeypatch.setattr(call_module, "route_of", spy)
    return answers


class Columns(BaseStreamer):
    def __init__(self):
        self.columns = []

    def put(self, value):
        self.columns.append(value.tolist())

    def end(self):
        self.columns.append("end")


class EndsAt(StoppingCriteria):
    """Keeps a state of its own, so that it must be called once per length."""

    def __init__(self, length: int):
        self.length, self.lengths = length, []

    def __call__(self, input_ids, scores, **kwargs):
        self.lengths.append(input_ids.shape[1])
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


def watched():
    """All that watches a call, made anew for every call."""
    return RAGGED | {
        "max_new_tokens": 24,
        "streamer": Columns(),
        "stopping_criteria": [EndsAt(25)],
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 4,
        "output_scores": True,
        "return_dict_in_generate": True,
    }


def test_a_watched_ragged_batch_asks_once_and_is_packed(asked):
    made = []
    check_same(tiny_llama(), lambda: made.append(watched()) or made[-1])
    assert asked == [Route("packed")]
    plain, ours = made
    assert ours["streamer"].columns == plain["streamer"].columns and ours["streamer"].columns[-1] == "end"
    assert ours["stopping_criteria"][0].lengths == plain["stopping_criteria"][0].lengths


def test_models_that_cannot_be_packed_ask_once_and_run_row_by_row(asked):
    model = set_special_tokens(new_model("bloom"))
    expected = model.generate(**RAGGED, max_new_tokens=12)
    check_same(model, RAGGED | {"max_new_tokens": 12}, source=Oracle(expected, RAGGED["attention_mask"]))
    (route,) = asked
    assert route.way == "rowwise" and "BloomForCausalLM cannot be packed" in route.reason


@pytest.mark.parametrize("architecture", ["bloom", "falcon", "gpt_neo"])
def test_padding_in_returned_caches_is_that_of_plain_decoding(architecture):
    """What masked columns hold depends on the width of the forward that computes them, so it must not hold drafts."""
    model = set_special_tokens(new_model(architecture), eos=None)
    arguments = RAGGED | {"max_new_tokens": 4, "return_dict_in_generate": True}
    expected = model.generate(**arguments)
    source = Oracle(expected.sequences, RAGGED["attention_mask"])
    with hf_smartspec.enabled(model):
        actual = model.generate(**arguments, assistant=source)
    assert actual.statistics.accepted_tokens > 0
    for ours, theirs in zip(actual[CACHE].layers, expected[CACHE].layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.values, theirs.values, rtol=1e-4, atol=1e-4)


def test_plain_calls_ask_once(asked):
    model = tiny_llama()
    expected = model.generate(**RAGGED, max_new_tokens=6, output_hidden_states=True)
    with hf_smartspec.enabled(model):
        actual = model.generate(**RAGGED, max_new_tokens=6, output_hidden_states=True, assistant="prompt_lookup")
    (route,) = asked
    assert route.way == "plain" and "hidden states" in route.reason
    assert torch.equal(actual, expected)


def test_requests_of_an_engine_ask_once_each(asked):
    with Engine(tiny_llama(), "prompt_lookup") as engine:
        engine.generate([[3, 4, 5], [6, 7]], max_new_tokens=4)
    assert asked == [Route("packed")] * 2


def route(model: PreTrainedModel, ids: torch.Tensor, **kwargs) -> Route:
    return route_of(model, ids, GenerationConfig(), kwargs)


def test_reasons_name_what_is_in_the_way():
    model, ids = tiny_llama(), torch.tensor([[3, 4, 5], [6, 7, 8]])
    assert route(model, ids) == Route("packed")
    assert route(model, ids, position_ids=torch.arange(3)[None]) == Route("packed")
    shifted = route(model, ids, position_ids=torch.arange(1, 4)[None])
    assert shifted.way == "rowwise" and "`position_ids`" in shifted.reason
    extra = route(model, ids, token_weights=torch.ones(2, 3))
    assert extra.way == "plain" and "token_weights" in extra.reason
    alone = route(model, ids[:1], token_weights=torch.ones(1, 3))
    assert alone.way == "rowwise" and "token_weights" in alone.reason
    mask = torch.tensor([[1, 0, 1], [1, 1, 1]])
    holes = route(new_model("mistral"), ids, attention_mask=mask, position_ids=mask.cumsum(-1) - 1)
    assert holes.way == "rowwise" and "holes" in holes.reason


def test_an_argument_that_a_release_has_renamed_is_said_once(monkeypatch, caplog):
    monkeypatch.setitem(route_of.__globals__, "_PACKED_KWARGS", _PACKED_KWARGS - {"use_cache"})
    model = tiny_llama()
    expected = model.generate(**RAGGED, max_new_tokens=6)
    with hf_smartspec.enabled(model):
        for _ in range(2):
            assert torch.equal(model.generate(**RAGGED, max_new_tokens=6, assistant="prompt_lookup"), expected)
    (record,) = [item for item in caplog.records if item.levelname == "WARNING"]
    assert "without speculation: the model arguments ['use_cache'] cannot be packed" in record.getMessage()


@pytest.mark.skipif(not RECURRENT, reason="hybrids are packed from transformers 5.24 on")
def test_hybrids_are_decoded_plainly_under_autocast_and_it_is_said_once(caplog):
    """What the model was found to be outside of autocast is not in doubt: other calls are packed before and after."""
    model, ids = set_special_tokens(new_model("qwen3_5_text"), eos=None), RAGGED["input_ids"][:1]
    assert route(model, ids).way == "packed"
    with torch.autocast("cpu", torch.bfloat16):
        expected = model.generate(ids, max_new_tokens=12)
        with hf_smartspec.enabled(model):
            for _ in range(2):
                assert torch.equal(model.generate(ids, max_new_tokens=12, assistant="prompt_lookup"), expected)
    (record,) = [item for item in caplog.records if item.levelname == "WARNING" and item.name.startswith("hf_smart")]
    assert "Decoding without speculation: under autocast, recurrent layers" in record.getMessage()
    assert route(model, ids).way == "packed"


@pytest.mark.skipif(not RECURRENT, reason="hybrids are packed from transformers 5.24 on")
def test_an_engine_serves_hybrids_whose_requests_come_from_an_autocasting_thread():
    model, prompt = set_special_tokens(new_model("qwen3_5_text"), eos=None), [3, 4, 5, 3, 4]
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=8)[0, len(prompt) :].tolist()
    with torch.autocast("cpu", torch.bfloat16), Engine(model, "prompt_lookup") as engine:
        (result,) = engine.generate([prompt], max_new_tokens=8)
    assert result.generated_tokens == expected
