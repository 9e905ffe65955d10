"""Sources with needs are shown every hidden state and score that they ask for, as a plain forward has them."""

import threading

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import StoppingCriteria, StoppingCriteriaList

import hf_smartspec
from hf_smartspec.decoding.loop import DecodingLoop
from hf_smartspec.target_model.compat import CACHE

from ..candidates.toy_hidden_states import NearestStates
from ..cases import left_padded
from ..models import RECURRENT, new_model, shared_model
from ..sources import Empty, Oracle, Random
from ..watching import Watching
from .shown import INPUTS, LENGTH, PROMPTS, OnlyTokens, decoded, drafter, plain


@pytest.mark.parametrize("kind", ["nothing", "chains that come true", "trees around them", "random trees"])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt2", "opt", "gemma3_text", "phi3", "bloom", "gptj"])
def test_ragged_batches(architecture, kind):
    model = shared_model(architecture)
    expected = plain(model)
    watching = Watching(drafter(kind, expected), layers=(-1, 0, 1))
    assert torch.equal(decoded(model, watching), expected)
    assert len(watching.ended) == 3
    watching.check(model)
    if kind in ("chains that come true", "trees around them"):
        assert watching.num_accepted > LENGTH


def test_the_output_of_the_last_layer_is_that_before_the_norm():
    model = shared_model("llama")
    watching = Watching(Empty(), layers=(2, -1))
    decoded(model, watching)
    for _, states in watching.ended:
        torch.testing.assert_close(model.model.norm(states[2]), states[-1])
        assert not torch.allclose(states[2], states[-1])


@pytest.mark.parametrize("kind", ["chains that come true", "trees around them"])
def test_sampling_and_processors(kind):
    """Rows that are picked for in rounds, by processors that change scores: those that are shown are the raw ones."""
    model = shared_model("llama")
    arguments = {"do_sample": True, "temperature": 0.8, "top_k": 20, "repetition_penalty": 1.2, "seed": 3}
    expected = decoded(model, Empty(), **arguments)
    watching = Watching(drafter(kind, expected))
    assert torch.equal(decoded(model, watching, **arguments), expected)
    watching.check(model)
    assert watching.num_accepted > LENGTH


def test_nothing_is_kept_for_sources_that_have_failed(monkeypatch):
    """Logits of whole steps are large."""
    model, kept, step = shared_model("llama"), [], DecodingLoop.step

    class Failing(Watching):
        def propose(self, *args):
            raise ValueError("for test")

    def noting(loop):
        ended = step(loop)
        kept.extend((request.fed, request.verified) for request in loop.running)
        return ended

    monkeypatch.setattr(DecodingLoop, "step", noting)
    assert torch.equal(decoded(model, Failing(Empty())), plain(model))
    assert len(kept) > LENGTH and set(kept) == {(None, None)}


class _Counting(LogitsProcessor):
    """Of unknown kind: sees all rows together, so that rows that are ahead wait for others."""

    def __call__(self, input_ids, scores):
        return scores + input_ids.shape[1] % 2


def test_rows_that_wait_for_others():
    model = shared_model("llama")
    arguments = {"logits_processor": LogitsProcessorList([_Counting()])}
    expected = plain(model, **arguments)
    watching = Watching(drafter("trees around them", expected))
    assert torch.equal(decoded(model, watching, **arguments), expected)
    watching.check(model)
    assert watching.num_accepted > LENGTH


class _StopsAll(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= 18)


@pytest.mark.parametrize("eos", [None, "one of the texts"])
def test_rows_that_end_early(eos):
    """By an end of text, by a criterion that cuts rows which are ahead, and with rows that run on."""
    model = shared_model("llama")
    token = None if eos is None else int(plain(model)[0, INPUTS["input_ids"].shape[1] + 4])
    arguments = {"eos_token_id": token, "stopping_criteria": StoppingCriteriaList([_StopsAll()])}
    expected = plain(model, **arguments)
    for records in (False, True):
        watching = Watching(drafter("trees around them", plain(model)))
        actual = decoded(model, watching, return_dict_in_generate=records, output_scores=records, **arguments)
        assert torch.equal(actual.sequences if records else actual, expected)
        watching.check(model)


def test_a_criterion_that_cuts_a_row_on_its_path():
    """Processors and criteria of unknown kind take turns: what was accepted beyond the end is not shown."""
    model = shared_model("llama")
    ends = {"logits_processor": LogitsProcessorList([_Counting()]), "eos_token_id": 96}
    known = plain(model, **ends)
    arguments = ends | {"stopping_criteria": StoppingCriteriaList([_StopsAll()])}
    expected = plain(model, **arguments)
    watching = Watching(drafter("chains that come true", known))
    assert torch.equal(decoded(model, watching, **arguments), expected)
    watching.check(model)
    assert any(len(step.path) >= len(step.tokens) for _, step in watching.steps), "no path was cut"


def test_long_prompts_are_run_in_pieces():
    model = shared_model("llama")
    inputs = left_padded([list(range(3, 90)) * 2, [7, 8, 9]])
    expected = plain(model, inputs)
    watching = Watching(drafter("trees around them", expected, inputs))
    assert torch.equal(decoded(model, watching, inputs, prefill_chunk_size=50), expected)
    watching.check(model)


@pytest.mark.parametrize("architecture", ["t5", "bart"])
def test_decoders_behind_encoders(architecture):
    model = shared_model(architecture)
    inputs = {"input_ids": torch.tensor([[5, 9, 5, 9, 5]]), "attention_mask": torch.ones(1, 5, dtype=torch.long)}
    expected = plain(model, inputs)
    watching = Watching(Oracle(expected.tolist()))
    assert torch.equal(decoded(model, watching, inputs), expected)
    watching.check(model, encoder_outputs=model.get_encoder()(input_ids=inputs["input_ids"]))
    assert watching.num_accepted > 0


def test_masked_tokens_within_a_row():
    for architecture in ("llama", "bloom"):
        model = shared_model(architecture)
        inputs = left_padded(PROMPTS)
        inputs["attention_mask"][2, 4] = 0
        expected = plain(model, inputs)
        watching = Watching(drafter("chains that come true", expected, inputs))
        assert torch.equal(decoded(model, watching, inputs), expected)
        text, states = watching.ended[2]
        assert len(text) - 1 == len(states[-1]) == len(PROMPTS[2]) - 1 + LENGTH - 1
        if architecture == "llama":  # bloom's positions count what is masked
            watching.check(model)


# --- What is not asked for --------------------------------------------------------------------------------------------


def hooks_of(model) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("architecture", ["llama", "bloom"])
def test_nothing_is_taken_where_nobody_asks(architecture, monkeypatch):
    model, seen = new_model(architecture), []
    from hf_smartspec.target_model.forward.hidden_states import HiddenStateTaps

    for name in ("taking", "_install"):
        monkeypatch.setattr(HiddenStateTaps, name, lambda *args: pytest.fail("hidden states are taken"))
    model.lm_head.register_forward_hook(lambda *args: seen.append(hooks_of(model)))
    before = hooks_of(model)
    source = OnlyTokens(0, is_tree=True)
    assert torch.equal(decoded(model, source), plain(model))
    assert set(seen) == {before}


@pytest.mark.parametrize("needs", [("hidden_states",), ("scores",), ("hidden_states", "scores")])
def test_hooks_live_as_long_as_forwards(needs):
    model, seen = new_model("llama"), []
    model.lm_head.register_forward_hook(lambda *args: seen.append(hooks_of(model)))
    before = hooks_of(model)
    watching = Watching(Random(0, True), (-1, 0) if "hidden_states" in needs else (), "scores" in needs)
    decoded(model, watching)
    assert seen[0] == before + 2 * ("hidden_states" in needs) and hooks_of(model) == before
    watching.check(model)  # by hooks of transformers' own, which stay
    for _, step in watching.steps:
        assert bool(step.hidden_states) == ("hidden_states" in needs)


def test_another_thread_that_runs_the_model_is_not_listened_to():
    model = new_model("llama")
    other = torch.tensor([[50, 51, 52]])

    def disturb(*args):
        if threading.current_thread() is main and not busy:
            busy.append(True)
            thread = threading.Thread(target=lambda: model.model(other))
            thread.start()
            thread.join()
            busy.clear()

    main, busy = threading.current_thread(), []
    expected = plain(model)
    model.lm_head.register_forward_hook(disturb)
    watching = Watching(drafter("trees around them", expected))
    assert torch.equal(decoded(model, watching), expected)
    watching.check(model)
    assert watching.num_accepted > LENGTH


# --- What cannot be had -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [(3,), (-2,), (0, 7)])
def test_layers_that_there_are_not_are_refused(layers):
    with pytest.raises(ValueError, match=r"Watching needs hidden states of layers .* after 0 to 2 layers"):
        decoded(shared_model("llama"), Watching(Empty(), layers))


@pytest.mark.skipif("qwen4_exp_text" not in RECURRENT, reason="this release has no such model")
def test_layers_with_several_streams_are_refused_and_the_norm_after_them_is_not():
    model = new_model("qwen4_exp_text")
    for layers in ((1,), (0, -1)):
        with pytest.raises(ValueError, match=r"pass on 2 streams of hidden states"):
            decoded(model, Watching(Empty(), layers))
        with hf_smartspec.Engine(model) as engine, pytest.raises(ValueError, match=r"pass on 2 streams"):
            engine.add_request(PROMPTS[0], assistant=Watching(Empty(), layers), max_new_tokens=2)
    assert torch.equal(decoded(model, Watching(Random(0, is_tree=True), (-1,))), plain(model))


def test_unknown_needs_are_refused():
    source = Watching(Empty())
    source.needs = frozenset({"attentions"})
    with pytest.raises(ValueError, match=r"Watching needs \['attentions'\]"):
        decoded(shared_model("llama"), source)


def test_models_without_a_known_decoder_are_refused(monkeypatch):
    monkeypatch.setattr("hf_smartspec.target_model.forward.hidden_states._LISTS", ("stages",))
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has no decoder with layers .* Pass another `assistant`"):
        decoded(shared_model("llama"), Watching(Empty()))


def test_a_forward_that_leaves_no_hidden_states_costs_the_source(monkeypatch):
    model = new_model("llama")
    run = model.model.layers[1].forward
    model.model.layers[1].forward = lambda *args, **kwargs: run(*args, **kwargs)
    monkeypatch.setattr("hf_smartspec.target_model.forward.hidden_states._first", lambda output: None)
    expected, watching = plain(model), Watching(Random(0, True))
    assert torch.equal(decoded(model, watching), expected)
    assert not watching.steps and not watching.texts


def test_a_cache_that_is_passed_in_has_no_hidden_states():
    """A source that looks back is dropped for the call; one that does not goes on."""
    model = shared_model("llama")
    inputs = {"input_ids": torch.tensor([PROMPTS[2]]), "attention_mask": torch.ones(1, 11, dtype=torch.long)}
    expected = plain(model, inputs)

    def cache():
        return model(input_ids=inputs["input_ids"][:, :6], use_cache=True)[CACHE]

    looking_back = Watching(Oracle(expected.tolist()))
    assert torch.equal(decoded(model, looking_back, inputs, **{CACHE: cache()}), expected)
    assert not looking_back.steps and looking_back.reused == [0]

    class Careless(NearestStates):
        def begin(self, request):
            assert request.shares_with is None and request.num_cached == 6
            super().begin(request)
            return 6

        def observe(self, request_id, step):
            starts.append((step.start, len(step.hidden_states[-1])))

    starts = []
    assert torch.equal(decoded(model, Careless(), inputs, **{CACHE: cache()}), expected)
    assert starts[0] == (6, 5) and starts[1][0] == 11


def test_transformers_own_loop_cannot_serve_them():
    with pytest.raises(
        ValueError, match="NearestStates needs the target's hidden_states, which transformers' own loop"
    ):
        NearestStates().get_candidates(torch.tensor([[3, 4]]))
