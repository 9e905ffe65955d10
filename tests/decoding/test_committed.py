"""Sources with needs are shown every hidden state and score that they ask for, as a plain forward has them."""

import threading

import numpy as np
import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import StoppingCriteria, StoppingCriteriaList

import hf_smartspec
from hf_smartspec import Engine, FixedLength, PromptLookupCandidates, SmartSpecConfig, TreeCandidateGenerator
from hf_smartspec.candidates import FusedCandidates, StagedCandidates

from ..candidates.toy_hidden_states import NearestStates
from ..cases import left_padded
from ..models import new_model, shared_model
from ..sources import Empty, Oracle, Random, WithDecoys
from ..watching import Watching

PROMPTS = [[5, 9, 5, 9, 5], [11], [3, 4, 5, 6, 7, 3, 4, 40, 41, 42, 43]]
INPUTS = left_padded(PROMPTS)
LENGTH = 16


def plain(model, inputs=INPUTS, length=LENGTH, **arguments):
    return model.generate(**inputs, max_new_tokens=length, **arguments)


def texts_of(sequences, inputs=INPUTS) -> list[list[int]]:
    width = inputs["input_ids"].shape[1]
    masks = torch.nn.functional.pad(inputs["attention_mask"], (0, sequences.shape[1] - width), value=1).bool()
    return [row[mask].tolist() for row, mask in zip(sequences, masks)]


def drafter(name: str, sequences=None, inputs=INPUTS) -> TreeCandidateGenerator:
    known = Oracle([] if sequences is None else texts_of(sequences, inputs))
    return {
        "nothing": Empty(),
        "chains that come true": known,
        "trees around them": WithDecoys(known, seed=1),
        "random chains": Random(0, is_tree=False),
        "random trees": Random(0, is_tree=True),
    }[name]


def decoded(model, source, inputs=INPUTS, length=LENGTH, **arguments):
    with hf_smartspec.enabled(model):
        return model.generate(**inputs, max_new_tokens=length, assistant=source, **arguments)


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


class _OnlyTokens(Random):
    def observe(self, request_id, tokens):
        assert type(tokens) is np.ndarray and len(tokens)
        super().observe(request_id, tokens)


def hooks_of(model) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("architecture", ["llama", "bloom"])
def test_nothing_is_taken_where_nobody_asks(architecture, monkeypatch):
    model, seen = new_model(architecture), []
    from hf_smartspec.target.hidden_states import HiddenStateTaps

    for name in ("taking", "_install"):
        monkeypatch.setattr(HiddenStateTaps, name, lambda *args: pytest.fail("hidden states are taken"))
    model.lm_head.register_forward_hook(lambda *args: seen.append(hooks_of(model)))
    before = hooks_of(model)
    source = _OnlyTokens(0, is_tree=True)
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
    with pytest.raises(ValueError, match=r"Watching needs hidden states of layers .* behind 0 to 2 layers"):
        decoded(shared_model("llama"), Watching(Empty(), layers))


def test_unknown_needs_are_refused():
    source = Watching(Empty())
    source.needs = frozenset({"attentions"})
    with pytest.raises(ValueError, match=r"Watching needs \['attentions'\]"):
        decoded(shared_model("llama"), source)


def test_models_without_a_known_decoder_are_refused(monkeypatch):
    monkeypatch.setattr("hf_smartspec.target.hidden_states._LISTS", ("stages",))
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has no decoder with layers .* Pass another `assistant`"):
        decoded(shared_model("llama"), Watching(Empty()))


def test_a_forward_that_leaves_no_hidden_states_costs_the_source(monkeypatch):
    model = new_model("llama")
    run = model.model.layers[1].forward
    model.model.layers[1].forward = lambda *args, **kwargs: run(*args, **kwargs)
    monkeypatch.setattr("hf_smartspec.target.hidden_states._first", lambda output: None)
    expected, watching = plain(model), Watching(Random(0, True))
    assert torch.equal(decoded(model, watching), expected)
    assert not watching.steps and not watching.texts


def test_a_cache_that_is_passed_in_has_no_hidden_states():
    """A source that looks back is dropped for the call; one that does not goes on."""
    model = shared_model("llama")
    inputs = {"input_ids": torch.tensor([PROMPTS[2]]), "attention_mask": torch.ones(1, 11, dtype=torch.long)}
    expected = plain(model, inputs)

    def cache():
        return model(input_ids=inputs["input_ids"][:, :6], use_cache=True).past_key_values

    looking_back = Watching(Oracle(expected.tolist()))
    assert torch.equal(decoded(model, looking_back, inputs, past_key_values=cache()), expected)
    assert not looking_back.steps and looking_back.reused == [0]

    class Careless(NearestStates):
        def reuse(self, request_id, length, earlier):
            assert earlier is None and length == 6
            return length

        def observe(self, request_id, step):
            starts.append((step.start, len(step.hidden_states[-1])))

    starts = []
    assert torch.equal(decoded(model, Careless(), inputs, past_key_values=cache()), expected)
    assert starts[0] == (6, 5) and starts[1][0] == 11


# --- The engine -------------------------------------------------------------------------------------------------------


def served(engine, prompts, length=LENGTH, **arguments) -> list[list[int]]:
    names = [engine.add_request(prompt, max_new_tokens=length, **arguments) for prompt in prompts]
    return [engine.get_result(name, timeout=60).generated_tokens for name in names]


def alone(model, prompt, length=LENGTH, **arguments) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, **arguments)
    return output[0, len(prompt) :].tolist()


def known(model, prompts, length=LENGTH) -> TreeCandidateGenerator:
    return WithDecoys(Oracle([prompt + alone(model, prompt, length) for prompt in prompts]), seed=1)


@pytest.mark.parametrize("max_batch_size", [1, 2, 8])
@pytest.mark.parametrize("max_prefill_tokens", [3, 7, 512])
def test_engines_with_pieces_of_prompts(max_batch_size, max_prefill_tokens):
    """Requests join and leave; prompts are run in pieces while others decode."""
    model = shared_model("llama")
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 97, rng.integers(1, 30)).tolist() for _ in range(9)]
    watching = Watching(known(model, prompts))
    with Engine(model, watching, max_batch_size=max_batch_size, max_prefill_tokens=max_prefill_tokens) as engine:
        assert served(engine, prompts) == [alone(model, prompt) for prompt in prompts]
    watching.check(model)
    assert len(watching.ended) == 9 and watching.num_accepted > LENGTH
    if max_prefill_tokens < 30:
        assert any(not len(step.tokens) for _, step in watching.steps), "no piece of a prompt was shown"


@pytest.mark.parametrize("keeps", [True, False])
def test_prompts_that_begin_alike(keeps):
    """What a source has kept is not run again, and what it has not is."""
    model = shared_model("llama")
    common = list(range(3, 33))
    prompts = [[*common, *tail] for tail in ([5, 6], [7], [5, 6, 8], [90], [])]
    watching = Watching(known(model, prompts), keeps=keeps)
    with Engine(model, watching, max_batch_size=2, max_prefill_tokens=16) as engine:
        fed, forward = [], engine._runner.memory.forward
        run = forward.forward
        forward.forward = lambda inputs: fed.append(sum(len(item.feed) for item in inputs)) or run(inputs)
        for prompt in prompts:
            assert served(engine, [prompt]) == [alone(model, prompt)]
        num_reused = engine._runner.memory.num_reused
        assert len(watching.states) <= 2, "states are kept whose keys and values have gone"
    watching.check(model)
    assert len(watching.reused) == 4 and num_reused == sum(watching.reused)
    assert (min(watching.reused) >= 29) if keeps else (num_reused == 0)
    assert sum(fed) >= sum(map(len, prompts)) - num_reused


def test_prompts_that_begin_as_a_running_text():
    model = shared_model("llama")
    prompts = [[*range(3, 33), tail] for tail in (5, 6, 7)]
    watching = Watching(known(model, prompts, 40))
    with Engine(model, watching, max_batch_size=4, max_prefill_tokens=8) as engine:
        assert served(engine, prompts, 40) == [alone(model, prompt, 40) for prompt in prompts]
        assert served(engine, prompts, 40) == [alone(model, prompt, 40) for prompt in prompts]
    watching.check(model)
    assert max(watching.reused) >= 30


def test_sources_of_others_have_kept_nothing():
    """A prefix that a request without such a source has left is run again for one that needs its states."""
    model = shared_model("llama")
    prompt = list(range(3, 33))
    watching = Watching(known(model, [prompt]))
    with Engine(model, "none", max_batch_size=2) as engine:
        assert served(engine, [prompt]) == [alone(model, prompt)]
        assert served(engine, [prompt], assistant=watching) == [alone(model, prompt)]
        assert engine._runner.memory.num_reused == 0
        assert served(engine, [prompt], assistant=watching) == [alone(model, prompt)]
        assert engine._runner.memory.num_reused == 29
        assert served(engine, [prompt]) == [alone(model, prompt)]
    watching.check(model)
    assert watching.reused == [0, 29]


class Forgetful(Watching):
    """Keeps hidden states of the first tokens only."""

    def reuse(self, request_id, length, earlier):
        return super().reuse(request_id, min(length, 10), earlier)


@pytest.mark.parametrize("together", [False, True])
def test_sources_that_have_kept_more_than_others_are_shown_it_again(together):
    """They are told so, before they are: what they have kept of it is of no use any more."""
    model = shared_model("llama")
    prompt = list(range(3, 33))
    more, fewer = Watching(known(model, [prompt])), Forgetful(known(model, [prompt]))
    with Engine(model, (FusedCandidates if together else StagedCandidates)([more, fewer]), max_batch_size=2) as engine:
        assert served(engine, [prompt]) == [alone(model, prompt)]
        assert served(engine, [prompt]) == [alone(model, prompt)]
        assert engine._runner.memory.num_reused == 10
    more.check(model)
    fewer.check(model)
    assert more.reused == [29, 10] and fewer.reused == [10]


def test_cancellation_in_flight():
    model = shared_model("llama")
    prompts = [[*range(3, 40), tail] for tail in range(50, 58)]
    watching = Watching(known(model, prompts, 60))
    with Engine(model, watching, max_batch_size=4, max_prefill_tokens=5) as engine:
        step, steps = engine._runner.loop.step, []

        def cancelling():
            steps.append(len(steps))
            if steps[-1] in (2, 9, 14, 21):  # some while their prompts are run, some later
                engine.cancel_request(names[steps[-1] % 8])
            return step()

        engine._runner.loop.step = cancelling
        with engine.pause():
            names = [engine.add_request(prompt, max_new_tokens=60) for prompt in prompts]
        outputs = [engine.get_result(name, timeout=60) for name in names]
    cancelled = [output.finish_reason == "cancelled" for output in outputs]
    assert sum(cancelled) == 4
    for prompt, output in zip(prompts, outputs):
        expected = alone(model, prompt, 60)
        assert output.generated_tokens == expected[: len(output.generated_tokens)]
    watching.check(model)


def test_weights_that_change_while_a_request_runs():
    """Its text is run anew, and the states with it, from the first token on."""
    model = new_model("llama")
    watching = Watching(PromptLookupCandidates(), scores=False)
    with Engine(model, watching, max_prefill_tokens=4) as engine:
        step, steps = engine._runner.loop.step, []

        def changing():
            steps.append(len(steps))
            if steps[-1] == 9:
                with torch.no_grad():
                    model.model.layers[0].mlp.down_proj.weight.mul_(1.1)
            return step()

        engine._runner.loop.step = changing
        served(engine, [[5, 9, 5, 9, 5, 9, 8, 7]], 30)
    assert watching.num_restarts == 1
    watching.check(model)  # of the new weights: nothing is left of the old ones


def test_the_toy_drafts_what_comes_true():
    """States find the places where a text that repeats itself goes on alike."""
    model = new_model("llama", std=0.1)
    prompts = [[5, 9, 5, 9, 5], [3, 4, 5, 6, 7, 3, 4]]
    for width in (1, 2):
        toy = NearestStates(width=width)
        with Engine(model, SmartSpecConfig(toy, policy=FixedLength(4 * width)), max_batch_size=2) as engine:
            assert served(engine, prompts, 60) == [alone(model, prompt, 60) for prompt in prompts]
            assert engine.statistics.accepted_tokens > 20
        inputs = left_padded(prompts)
        assert torch.equal(decoded(model, toy, inputs, 60), plain(model, inputs, 60))
        assert not toy.texts and len(toy.states) <= 2, "`generate` keeps nothing"


# --- Several sources as one -------------------------------------------------------------------------------------------


def test_fused_sources_get_what_each_has_asked_for():
    """Hidden states of different layers, scores, or tokens alone; prefixes are reused as far as all can do without."""
    model = shared_model("llama")
    common = list(range(3, 33))
    prompts = [[*common, *tail] for tail in ([5, 6], [7], [5, 6, 8])]
    sources = [
        Watching(known(model, prompts), (-1, 1), scores=False),
        Watching(Random(0, is_tree=True), (0,), scores=True),
        Watching(Random(1, is_tree=True), (), scores=True),
        _OnlyTokens(2, is_tree=True),
    ]
    with Engine(model, SmartSpecConfig(sources, num_nodes=8), max_batch_size=2, max_prefill_tokens=7) as engine:
        for prompt in prompts:
            assert served(engine, [prompt]) == [alone(model, prompt)]
        assert engine.statistics.accepted_tokens > LENGTH
        assert engine._runner.memory.num_reused == sum(sources[0].reused) >= 2 * 29
    for watching in sources[:3]:
        watching.check(model)
        assert len(watching.ended) == 3 and all(
            set(states) <= set(watching.hidden_layers) for _, states in watching.ended
        )
    assert all(len(step.tokens) for _, step in sources[2].steps), "pieces of prompts have no scores"


def test_a_fused_source_that_keeps_nothing_has_its_states_computed():
    model = shared_model("llama")
    prompts = [[*range(3, 33), tail] for tail in (5, 6)]
    sources = [Watching(known(model, prompts), keeps=keeps) for keeps in (True, False)]
    with Engine(model, SmartSpecConfig(sources, num_nodes=6), max_batch_size=2) as engine:
        for prompt in prompts:
            assert served(engine, [prompt]) == [alone(model, prompt)]
        assert engine._runner.memory.num_reused == 0
    for watching in sources:
        watching.check(model)
    assert sources[0].num_restarts == 0 and sources[0].reused[-1] == 0, "it is told before its states come once more"


def test_transformers_own_loop_cannot_serve_them():
    with pytest.raises(
        ValueError, match="NearestStates needs the target's hidden_states, which transformers' own loop"
    ):
        NearestStates().get_candidates(torch.tensor([[3, 4]]))
