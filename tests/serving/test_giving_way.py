"""Requests that give way to other namespaces go on later, with the tokens that they would get alone."""

import itertools

import numpy as np
import pytest
import torch
from transformers import StoppingCriteriaList

from hf_smartspec import DraftModelCandidates, EarlyExitCandidates, Engine, FixedLength, SmartSpecConfig
from hf_smartspec.candidates.base import NoCandidates
from hf_smartspec.serving import scheduler
from hf_smartspec.serving.memory import prefix_cache
from hf_smartspec.target_model.compat import RequestStatus
from hf_smartspec.target_model.support import capabilities

from ..architectures import small_model
from ..candidates.heads.fitted import fitted_eagle, fitted_heads
from ..cases import prompts_of
from ..covering import exhaustive
from ..generate.helpers import EOS, Spy, noisy_copy, set_special_tokens, tiny_llama
from ..models import new_model
from ..target_model.forward import test_rotary as lengthwise
from ..watching import Watching
from .helpers import TIMEOUT, Asked, StopsAt, all_alone, of, random_requests, suffix

LONG = {"max_new_tokens": 60, "eos_token_id": None}
SHORT = {"max_new_tokens": 4, "eos_token_id": None}
SOURCES = {
    "none": lambda model: NoCandidates(),
    "suffix": lambda model: Spy(suffix()),
    "draft model": lambda model: DraftModelCandidates(noisy_copy(model)),
    "early exit": lambda model: EarlyExitCandidates(model, num_layers=1, num_nodes=4),
}


@pytest.fixture
def model():
    return tiny_llama()


@pytest.fixture
def short_turns(monkeypatch):
    """Requests give way to one another all the time."""
    monkeypatch.setattr(scheduler, "TURN", 2)


def check_turns(engine: Engine, model, requests: list[Asked], choices, expected=None) -> list:
    """Requests of several namespaces at once, some of which give way: all get what they would get alone."""
    expected = expected or all_alone(model, requests)
    with engine.pause():
        names = [
            engine.add_request(asked.prompt, assistant=choice, **asked.arguments)
            for asked, choice in zip(requests, itertools.cycle(choices))
        ]
    outputs = [engine.get_result(name, timeout=TIMEOUT) for name in names]
    for asked, output, tokens in zip(requests, outputs, expected):
        assert output is not None and output.error is None
        assert output.generated_tokens == tokens, asked
    assert engine._runner.num_suspended > 0, "none gave way"
    assert f"{engine._runner.num_suspended} times" in str(engine.report())
    assert not len(engine._memory.scheduler) and not engine._runner._num_open
    return outputs


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("max_tokens", [None, 200])
def test_whoever_gives_way_gets_its_own_tokens(model, short_turns, name, max_tokens):
    """Settings are of all kinds, with seeds; one bound on memory keeps no rows of suspended requests."""
    source, requests = SOURCES[name](model), random_requests(24)
    max_bytes = max_tokens and max_tokens * Engine(model)._memory.bytes_per_token
    config = SmartSpecConfig(source, policy=FixedLength(4))
    with Engine(model, config, max_batch_size=2, max_kv_bytes=max_bytes, max_prefill_tokens=8) as engine:
        check_turns(engine, model, requests, [of(whose, source) for whose in "abc"])
        if name != "none":
            assert engine.statistics.accepted_tokens > 0
    if isinstance(source, Spy):
        assert source.started == source.stopped == 24, "sources know them all the time"


@pytest.mark.parametrize(
    "architecture", ["bloom", "rwkv", "zamba", "t5", *exhaustive(["openai-gpt"], ["bart"], ["m2m_100"])]
)
def test_other_ways_to_run_models(short_turns, architecture):
    model = set_special_tokens(new_model(architecture), EOS)
    source, requests = suffix(), random_requests(9, longest=20, max_new_tokens=12)
    with Engine(model, source, max_batch_size=2, max_prefill_tokens=4) as engine:
        check_turns(engine, model, requests, [of(whose, source) for whose in "abc"])
        assert engine._memory.num_bytes == 0 or architecture in ("t5", "bart")


def test_models_that_keep_their_state_in_themselves(short_turns, monkeypatch):
    monkeypatch.setattr(capabilities, "recurrent_layers", lambda model: None)
    model = set_special_tokens(small_model("recurrent_gemma"), EOS)
    # Prompts of one token see, also in plain `generate`, what the text before them has left in the modules.
    requests = [asked for asked in random_requests(8, longest=12, max_new_tokens=12) if len(asked.prompt) > 1]
    with Engine(model, "none") as engine:
        check_turns(engine, model, requests, [of(whose) for whose in "ab"])


@pytest.mark.parametrize("name", ["phi3 longrope", "llama dynamic", *exhaustive(["llama longrope"])])
def test_embeddings_that_depend_on_the_length(short_turns, name):
    """Recomputed tokens get the same embeddings as before."""
    model = lengthwise.model_of(name)
    requests = [Asked(prompt, {"max_new_tokens": lengthwise.NEW}) for prompt in prompts_of((16, 30, 50, 20, 44, 25))]
    expected = [
        lengthwise.plain(model, {"input_ids": torch.tensor([asked.prompt])})[0, len(asked.prompt) :].tolist()
        for asked in requests
    ]
    choices = [of(whose, "prompt_lookup") for whose in "abc"]
    with Engine(model, "prompt_lookup", max_batch_size=2, max_prefill_tokens=7) as engine:
        check_turns(engine, model, requests, choices, expected)


@pytest.mark.parametrize("num_prompt", [4, *exhaustive([40])])
def test_sources_are_shown_all_hidden_states_again(model, short_turns, num_prompt):
    rng = np.random.default_rng(0)
    requests = [Asked(rng.integers(3, 40, num_prompt).tolist(), {"max_new_tokens": 20}) for _ in range(6)]
    watching = Watching(suffix())
    config = SmartSpecConfig(watching, policy=FixedLength(4))
    with Engine(model, config, max_batch_size=2, max_prefill_tokens=8) as engine:
        check_turns(engine, model, requests, [of(whose, watching) for whose in "abc"])
    watching.check(model)
    assert watching.num_restarts > 0


def test_what_another_has_read_meanwhile_leaves_no_states_out(model):
    """One that has given way while it read its prompt goes on with the states that its source lacks."""
    begins = list(range(3, 35))
    watching = Watching(suffix())
    with Engine(
        model, SmartSpecConfig(watching, policy=FixedLength(4)), max_batch_size=2, max_prefill_tokens=4
    ) as engine:
        step, steps, names = engine._runner.loop.step, [], []

        def adding():
            steps.append(1)
            if len(steps) == 3:
                names.append(engine.add_request([9, 8, 7], assistant=of("b", watching), **SHORT))
            return step()

        engine._runner.loop.step = adding
        requests = [Asked([*begins, tail], SHORT) for tail in (36, 37)]
        with engine.pause():
            others = [engine.add_request(asked.prompt, assistant=of("a", watching), **SHORT) for asked in requests]
        for asked, name in zip(requests, others):
            assert engine.get_result(name, timeout=TIMEOUT).generated_tokens == asked.alone(model)
        assert engine.get_result(names[0], timeout=TIMEOUT).error is None
        assert engine._runner.num_suspended == 1
    watching.check(model)


def test_memory_that_nobody_needed_is_not_computed_anew(model, short_turns):
    requests = [Asked([3 + number, *range(4, 30)], LONG) for number in range(2)]
    with Engine(model, "none", max_batch_size=1) as engine:
        forward, fed = engine._memory.forward, []
        run = forward.forward
        forward.forward = lambda inputs: fed.append(sum(len(item.feed) for item in inputs)) or run(inputs)
        check_turns(engine, model, requests, [of("a"), of("b")])
        num_suspended = engine._runner.num_suspended
    assert num_suspended > 10 and sum(fed) <= 2 * (27 + 60)


@pytest.mark.parametrize("kind", [fitted_eagle, fitted_heads])
def test_learned_heads_go_on(model, short_turns, kind):
    requests = [Asked([3 + number, 4, 5], {"max_new_tokens": 24, "eos_token_id": None}) for number in range(6)]
    texts = torch.tensor([asked.prompt + tokens for asked, tokens in zip(requests, all_alone(model, requests))])
    heads = kind(model, texts)
    config = SmartSpecConfig(heads, policy=FixedLength(4))
    with Engine(model, config, max_batch_size=2) as engine:
        check_turns(engine, model, requests, [of(whose, heads) for whose in "abc"])
        assert engine.statistics.accepted_tokens > 0


def test_streams_criteria_and_traces_know_nothing_of_it(model, short_turns):
    """Every length is seen once, in order; timestamps, traces and statistics are of all steps."""
    source = suffix()
    with Engine(model, SmartSpecConfig(source, policy=FixedLength(4)), max_batch_size=1) as engine:
        criterion = StopsAt(3 + 18)
        with engine.pause():
            name = engine.add_request(
                [3, 4, 5],
                streaming=True,
                record_timestamps=True,
                trace=True,
                assistant=of("a", source),
                stopping_criteria=StoppingCriteriaList([criterion]),
                **LONG,
            )
            others = [engine.add_request([6, 7], assistant=of("b", source), **LONG) for _ in range(2)]
        outputs = list(engine.request_id_iter(name))
        for other in others:
            assert engine.get_result(other, timeout=TIMEOUT).generated_tokens == Asked([6, 7], LONG).alone(model)
    last, lengths = outputs[-1], [len(output.generated_tokens) for output in outputs]
    assert last.generated_tokens == Asked([3, 4, 5], LONG).alone(model)[:18] and last.finish_reason == "stop"
    assert criterion.lengths == list(range(4, 22)) and lengths == sorted(lengths)
    assert len(last.timestamps) == len(last.token_sources) == 18 and last.timestamps == sorted(last.timestamps)
    assert sum(step.num_generated for step in last.traced_steps) >= 18
    assert last.statistics.generated_tokens == 18 and last.statistics.steps == len(last.traced_steps)
    assert engine._runner.num_suspended > 0


def test_who_has_given_way_can_be_cancelled(model, monkeypatch):
    source, found = Spy(suffix()), []
    propose = source.propose

    def watched(*args):
        """Cancel both requests in a step of the second one, while the first one waits with its text."""
        waiting = [pending for pending in runner.memory.scheduler.waiting if pending.output.request_id == first]
        if waiting and waiting[0].request.is_resumed and not found:
            request = waiting[0].request
            found.append((waiting[0].output.status, request.row, request.num_generated))
            for name in (first, second):
                engine.cancel_request(name)
        return propose(*args)

    with Engine(model, SmartSpecConfig(source, policy=FixedLength(2)), max_batch_size=1) as engine:
        runner = engine._runner
        with engine.pause():
            arguments = LONG | {"max_new_tokens": 400}
            first, second = (engine.add_request([3, 4], assistant=of(whose, source), **arguments) for whose in "ab")
            monkeypatch.setattr(source, "propose", watched)
        output = engine.get_result(first, timeout=TIMEOUT)
        assert output.finish_reason == "cancelled" and len(output.generated_tokens) >= scheduler.TURN - 2
        ((status, row, num_generated),) = found
        assert status == RequestStatus.PENDING and row is None and num_generated > 0
        assert engine.get_result(second, timeout=TIMEOUT).finish_reason == "cancelled"
        assert source.started == source.stopped == 2, "no source keeps anything of a request that is gone"
        name = engine.add_request([7], assistant=of("b", source), **SHORT)
        assert engine.get_result(name, timeout=TIMEOUT).generated_tokens == Asked([7], SHORT).alone(model)
        source.source.remove_namespace("a")  # refused as long as a request of it is there
    assert not len(runner.memory.scheduler) and not runner._num_open and not runner.loop.suspended


def test_heads_keep_nothing_of_who_was_cancelled_while_another_had_its_turn(model, short_turns):
    """Heads keep states of ended requests only while their keys and values are cached."""
    heads = fitted_eagle(model, torch.tensor([[3, 4, 5, *Asked([3, 4, 5], LONG).alone(model)]]))
    longer = LONG | {"max_new_tokens": 200}
    with Engine(model, SmartSpecConfig(heads, policy=FixedLength(4)), max_batch_size=1) as engine:
        runner, step, sources = engine._runner, engine._runner.loop.step, set()

        def cancelling():
            for pending in runner.memory.scheduler.waiting:
                if pending.request.is_resumed:
                    sources.update(pending.request.chain.sources)
                    engine.cancel_request(pending.output.request_id)
            return step()

        runner.loop.step = cancelling
        with engine.pause():
            names = [engine.add_request([6 + number, 4], assistant=of("ab"[number % 2], heads), **longer)
                     for number in range(6)]  # fmt: skip
        reasons = [engine.get_result(name, timeout=TIMEOUT).finish_reason for name in names]
        assert reasons.count("cancelled") > 2
        (source,) = sources
        kept = {text.request_id for text in engine._memory.prefixes._rows.values()}
        assert set(source._ended) <= kept and not source._states


def test_an_engine_stops_while_some_have_given_way(model, short_turns):
    source = Spy(suffix())
    engine = Engine(model, SmartSpecConfig(source, policy=FixedLength(2)), max_batch_size=1).start()
    longer = LONG | {"max_new_tokens": 400}
    names = [engine.add_request([3, 4], assistant=of(whose, source), streaming=True, **longer) for whose in "abc"]
    next(engine.request_id_iter(names[1]))
    engine.stop(drain=False)
    reasons = {engine.get_result(name).finish_reason for name in names}
    assert "cancelled" in reasons and reasons <= {"cancelled", "length"}
    assert source.started == source.stopped > 1 and not engine._runner.loop.suspended
    engine.start()
    assert engine.generate([[3, 4]], **SHORT)[0].generated_tokens == Asked([3, 4], SHORT).alone(model)
    engine.stop()


def test_where_memory_forgets_texts_turns_are_longer(model, short_turns):
    """A request that was computed anew goes on for an eighth of that before it gives way again."""
    bytes_per_token = Engine(model)._memory.bytes_per_token
    rng = np.random.default_rng(0)
    requests = [Asked(rng.integers(3, 40, 200).tolist(), {"max_new_tokens": 60, "eos_token_id": None}) for _ in "ab"]
    with Engine(model, "none", max_batch_size=1, max_kv_bytes=300 * bytes_per_token) as engine:
        check_turns(engine, model, requests, [of("a"), of("b")])
        assert engine._runner.num_suspended <= 2 * (1 + 60 // (200 // 8))


def test_what_was_kept_of_others_keeps_nobody_from_giving_way(model, monkeypatch):
    """Texts that have ended, and began in a running request's row, are given up."""
    monkeypatch.setattr(prefix_cache, "LEAST_SAVED", 64)
    monkeypatch.setattr(prefix_cache, "LEAST_SHARED", 64)
    bytes_per_token = Engine(model)._memory.bytes_per_token
    begins, longer = np.random.default_rng(0).integers(3, 40, 80).tolist(), LONG | {"max_new_tokens": 400}
    with Engine(model, "none", max_batch_size=2, max_kv_bytes=640 * bytes_per_token) as engine:
        step, steps, names, sharers = engine._runner.loop.step, [], [], []

        def adding():
            steps.append(1)
            if len(steps) == 3:
                names.append(engine.add_request([*begins, 4, 5], assistant=of("a"), **SHORT))
            if len(steps) == 12:
                sharers.extend(request.row.num_sharers for request in engine._runner.loop.running)
                names.append(engine.add_request([6] * 500, assistant=of("b"), **SHORT))
            return step()

        engine._runner.loop.step = adding
        first = engine.add_request([*begins, 3], assistant=of("a"), **longer)
        assert engine.get_result(first, timeout=TIMEOUT).generated_tokens == Asked([*begins, 3], longer).alone(model)
        outputs = [engine.get_result(name, timeout=TIMEOUT).generated_tokens for name in names]
        assert outputs == [Asked(prompt, SHORT).alone(model) for prompt in ([*begins, 4, 5], [6] * 500)]
        assert sharers == [1], "the second one has ended, and its row is kept"
        assert engine._runner.num_suspended > 0


def test_weights_change_while_some_have_given_way(model, short_turns):
    """Nothing of what the old ones have computed counts when they go on."""
    other = tiny_llama(seed=7)
    with Engine(model, "none", max_batch_size=1) as engine:
        longer = {"max_new_tokens": 200, "eos_token_id": None}
        names = [engine.add_request([3, 4, 5], assistant=of(whose), streaming=True, **longer) for whose in "ab"]
        for name in names:
            next(engine.request_id_iter(name))
        with engine.pause():
            model.load_state_dict(other.state_dict())
            pendings = [*engine._runner.memory.scheduler.running, *engine._runner.memory.scheduler.waiting]
            known = {pending.output.request_id: list(pending.request.tokens) for pending in pendings}
        assert len(known) == 2 and max(map(len, known.values())) < 200
        for name in names:
            left = {"max_new_tokens": 200 - len(known[name]), "eos_token_id": None}
            rest = Asked([3, 4, 5, *known[name]], left).alone(model)
            assert engine.get_result(name, timeout=TIMEOUT).generated_tokens == known[name] + rest


@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_sampled_drafts(model, short_turns, verification):
    """Coupled sampling yields the tokens of the seed; with rejection, tokens depend on drafts."""
    draft = noisy_copy(model)
    settings = {"do_sample": True, "temperature": 0.8, "max_new_tokens": 20, "eos_token_id": None}
    requests = [Asked([3, 4, number], settings, seed=number) for number in range(5, 11)]
    with Engine(model, SmartSpecConfig(draft, policy=FixedLength(3)), max_batch_size=2) as engine:
        choices = [of(whose, draft, verification=verification) for whose in "abc"]
        if verification == "coupled":
            check_turns(engine, model, requests, choices)
        else:
            for asked, choice in zip(requests, itertools.cycle(choices)):
                engine.add_request(asked.prompt, assistant=choice, **asked.arguments)
            assert all(len(output.generated_tokens) == 20 for output in engine)
        assert engine.statistics.accepted_tokens > 0
