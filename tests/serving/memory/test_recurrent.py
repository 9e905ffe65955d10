"""Engines of models with recurrent layers: one forward for all requests, whose states are counted as memory."""

import numpy as np
import pytest

from hf_smartspec import DraftModelCandidates, Engine, SmartSpecConfig
from hf_smartspec.drafts.tree import DraftTree
from hf_smartspec.goodput import FixedLength
from hf_smartspec.serving.memory import state_memory
from hf_smartspec.serving.memory.kv_memory import EngineMemory
from hf_smartspec.target_model.layout.rows import RowInput
from hf_smartspec.target_model.recurrent.cache import StateCache
from hf_smartspec.target_model.written import packed_forward

from ...covering import part_of
from ...generate.helpers import EOS, set_special_tokens
from ...models import RECURRENT, UNPADDED, new_model
from ..helpers import TIMEOUT, Asked, all_at_once, change_weights_while_running, check_all, random_requests, suffix
from ..test_giving_way import check_turns, of, short_turns  # noqa: F401 (a fixture)

pytestmark = pytest.mark.skipif(not RECURRENT, reason="this release's layers with states are not known")
LONG = {"max_new_tokens": 30, "eos_token_id": None}


def model_of(architecture: str, **changes):
    return set_special_tokens(new_model(architecture, **changes), EOS)


def drafting():
    return SmartSpecConfig(suffix(), policy=FixedLength(4))


@pytest.mark.parametrize(
    "architecture",
    part_of(
        [*RECURRENT, *UNPADDED],
        *[name for name in ("qwen3_5_text", "kimi_linear", "bamba", "mamba2", "jamba") if name in RECURRENT],
        *[name for name in UNPADDED if name == "recurrent_gemma"],
    ),
)
def test_many_requests_with_their_own_settings(architecture):
    """More than run at once, prompts in pieces, greedy and seeded: packed, with drafts."""
    model = model_of(architecture)
    with Engine(model, drafting(), max_batch_size=4, max_prefill_tokens=9) as engine:
        assert isinstance(engine._memory.cache, StateCache)
        # There, prompts of one token see in plain `generate` what the text before them has left in the modules.
        requests = [item for item in random_requests(16) if len(item.prompt) > (architecture == "recurrent_gemma")]
        check_all(engine, model, requests)
        check_all(engine, model, requests[:4])  # answers that are remembered
        statistics = engine.statistics
        assert statistics.accepted_tokens > 0
        assert statistics.forwards < statistics.generated_tokens, "requests share forwards"


def test_requests_that_give_way(short_turns):  # noqa: F811
    model, source = model_of("qwen3_next"), suffix()
    with Engine(model, source, max_batch_size=2, max_prefill_tokens=4) as engine:
        requests = random_requests(9, longest=20, max_new_tokens=12)
        check_turns(engine, model, requests, [of(whose, source) for whose in "abc"])


def test_cancelled_requests_leave_others_alone():
    model = model_of("qwen3_next")
    with Engine(model, drafting(), max_batch_size=2) as engine:
        kept = engine.add_request([3, 4, 5], **LONG)
        gone = [engine.add_request([8, 9, number], max_new_tokens=1000, streaming=True) for number in (3, 4, 5)]
        for name in gone:
            next(engine.request_id_iter(name))
            engine.cancel_request(name)
        assert engine.get_result(kept, TIMEOUT).generated_tokens == Asked([3, 4, 5], LONG).alone(model)
        check_all(engine, model, random_requests(3))
        cache = engine._memory.cache
        assert not cache._open and cache._step is None, "kept rows do not keep the steps that they ended in"


def test_weights_that_change_while_a_request_runs():
    model, other = model_of("qwen3_next"), model_of("qwen3_next", seed=7)
    with Engine(model, suffix(), max_prefill_tokens=4) as engine:
        change_weights_while_running(engine, [3, 4, 5, 6, 7, 8], 60, other)


def reused(engine, model, text, **arguments) -> int:
    """Tokens of a prompt that were not run again; what it yields is the same as by itself."""
    before = engine._memory.num_reused
    found = engine.get_result(engine.add_request(text, **LONG, **arguments), TIMEOUT)
    seed = arguments.pop("seed", None)
    assert found.generated_tokens == Asked(text, LONG | arguments, seed).alone(model)
    return engine._memory.num_reused - before


def test_prompts_go_on_from_states_that_are_kept():
    """At the end of a text and of its prompt, and where a prompt departed from a known text."""
    model, rng = model_of("qwen3_next"), np.random.default_rng(0)
    begin = rng.integers(3, 40, 70).tolist()
    with Engine(model, drafting(), max_batch_size=2, max_prefill_tokens=50) as engine:
        answer = engine.get_result(engine.add_request([*begin, 3, 4], **LONG), TIMEOUT).generated_tokens
        longer = [*begin, 3, 4, *answer, 5, 6]
        for text, num_reused in (
            ([*begin, 3, 4], 71), ([*begin, 7, 8], 0), ([*begin, 9, 8], 70), (longer, 101), ([*longer, 7], 101),
            ([*begin, 10], 70), (begin[:40], 0), (begin[:40], 39), (begin[:38], 0), (begin[:60], 39),
            ([*begin, 7, 9], 71),
        ):  # fmt: skip
            assert reused(engine, model, text) == num_reused, text
        assert reused(engine, model, [*begin, 3, 4], do_sample=True, seed=3) == 71
        memory = engine._memory
        assert len(memory.cache.rows) == len(memory.prefixes) > 2, "more are kept than may run"
        assert not memory.cache._entries, "states of rows that run"


def test_long_prompts_keep_states_on_the_way(monkeypatch):
    monkeypatch.setattr(state_memory, "_EVERY", 40)
    model, rng = model_of("kimi_linear"), np.random.default_rng(0)
    text = rng.integers(3, 40, 230).tolist()
    with Engine(model, drafting(), max_prefill_tokens=25) as engine:
        assert reused(engine, model, text) == 0
        assert reused(engine, model, [*text[:190], 7]) == 150
        assert reused(engine, model, [*text[:195], 7]) == 190, "where the one before departed"


@pytest.mark.parametrize("architecture", ["qwen3_5_text", "nemotron_h", "lfm2"])
def test_choices_of_a_prompt_read_it_once(architecture):
    """So do prompts that begin alike: the first one keeps its states where the others depart."""
    model, rng = model_of(architecture), np.random.default_rng(0)
    text = rng.integers(3, 40, 67).tolist()
    for texts, num_reused in (([text] * 4, 3 * 66), ([[*text, token, token] for token in (3, 4, 5)], 2 * 67)):
        with Engine(model, drafting(), max_prefill_tokens=30) as engine:
            with all_at_once(engine):
                names = [engine.add_request(own, **LONG, do_sample=True, seed=seed) for seed, own in enumerate(texts)]
            for seed, (own, name) in enumerate(zip(texts, names)):
                found = engine.get_result(name, TIMEOUT)
                assert found.generated_tokens == Asked(own, LONG | {"do_sample": True}, seed).alone(model)
            assert engine._memory.num_reused == num_reused


def test_requests_of_other_namespaces_do_not_wait_for_states():
    model, text = model_of("qwen3_next"), list(range(3, 38)) * 2
    with Engine(model, suffix(), max_prefill_tokens=10) as engine:
        with all_at_once(engine):
            names = [engine.add_request(text, assistant=of(whose), **LONG) for whose in "ab"]
        for name in names:
            assert engine.get_result(name, TIMEOUT).generated_tokens == Asked(text, LONG).alone(model)
        assert not engine._memory.num_reused


def test_states_of_generated_tokens_are_no_prompts():
    """Nemotron-H limits the time steps of prompts only, so that an answer that is part of a prompt is run anew."""
    model, begin = model_of("nemotron_h"), list(range(3, 38)) * 2
    with Engine(model, drafting()) as engine:
        answer = engine.get_result(engine.add_request(begin, **LONG), TIMEOUT).generated_tokens
        assert reused(engine, model, [*begin, *answer, 5, 6]) == 69


def test_without_memory_for_copies_of_states_prompts_are_run_anew(monkeypatch):
    model, begin = model_of("qwen3_next"), list(range(3, 38)) * 2
    failed = []

    def fail(*args):
        failed.append(args)
        raise RuntimeError("not enough memory")  # as torch says it

    with Engine(model, drafting(), max_batch_size=4) as engine:
        monkeypatch.setattr(StateCache, "_copied", fail)
        monkeypatch.setattr(StateCache, "_before_last", fail)
        for text in ([*begin, 3, 4], [*begin, 7, 8], [*begin, 9, 8]):
            assert reused(engine, model, text) == 0
        assert failed and not engine._memory.cache.rows, "without states, rows are of no use"


def test_states_that_cannot_be_computed_end_the_requests_that_run(monkeypatch):
    """The engine goes on."""
    model, text = model_of("qwen3_next"), list(range(3, 38)) * 2
    keep, failures = StateCache.keep, [RuntimeError("not enough memory")]

    def failing(cache, row):
        if failures:
            raise failures.pop()
        keep(cache, row)

    monkeypatch.setattr(state_memory, "_EVERY", 20)
    monkeypatch.setattr(StateCache, "keep", failing)
    with Engine(model, drafting(), max_prefill_tokens=25) as engine:
        failed = engine.get_result(engine.add_request(text, **LONG), TIMEOUT)
        assert "not enough memory" in failed.error and not failures
        assert reused(engine, model, text) == 0


def bytes_of_one(model) -> int:
    """Bytes of one running row beside its keys and values."""
    return packed_forward(model).footprint().state


def test_states_are_counted_as_memory():
    """With room for the states of seven rows, three run, and no more are kept than fit beside keys and values."""
    model, taken = model_of("qwen3_next", linear_key_head_dim=32, linear_value_head_dim=32), []
    most = 7 * bytes_of_one(model)
    with Engine(model, suffix(), max_batch_size=8, max_kv_bytes=most) as engine:
        memory, step = engine._memory, engine._runner.loop.step

        def watched():
            taken.append((memory.num_bytes, len(memory.cache._entries), len(memory.cache.kept)))
            return step()

        engine._runner.loop.step = watched
        check_all(engine, model, random_requests(16, longest=12, max_new_tokens=6))
    num_bytes, num_running, num_kept = map(max, zip(*taken))
    assert num_bytes <= most and num_running == 3 and 2 <= num_kept < 16


def test_states_take_memory_that_no_row_needs_before_rows_give_way(monkeypatch):
    model, text = model_of("qwen3_next"), list(range(3, 38)) * 2
    with Engine(model, drafting(), max_batch_size=2, max_kv_bytes=2**20, max_prefill_tokens=30) as engine:
        assert reused(engine, model, text) == 0
        memory, cache = engine._memory, engine._memory.cache
        monkeypatch.setattr(memory, "_shrink", lambda: None)
        cache._lay_out({}, cache.limit)  # as large as it may be
        assert not cache.may_keep
        assert reused(engine, model, [*text[:50], 2]) == 0 and reused(engine, model, [*text[:50], 1]) == 50
        assert reused(engine, model, text) == 69, "the first row is still there"
        assert memory.num_bytes <= 2**20


def test_without_memory_to_return_some_no_states_are_kept(monkeypatch):
    model, text = model_of("qwen3_next"), list(range(3, 38)) * 2

    def fail(*args):
        raise RuntimeError("not enough memory")

    with Engine(model, drafting(), max_batch_size=2, max_kv_bytes=2**20, max_prefill_tokens=30) as engine:
        memory, cache = engine._memory, engine._memory.cache
        monkeypatch.setattr(memory, "_shrink", lambda: None)
        monkeypatch.setattr(cache, "shrink", fail)
        cache._lay_out({}, cache.limit)
        assert reused(engine, model, text) == reused(engine, model, text) == 0


def test_rows_give_way_to_states_one_by_one():
    model, rng = model_of("qwen3_next"), np.random.default_rng(0)
    with Engine(model, drafting(), max_batch_size=2, max_kv_bytes=2**20) as engine:
        for _ in range(3):
            assert reused(engine, model, rng.integers(3, 40, 50).tolist()) == 0
        memory, cache = engine._memory, engine._memory.cache
        oldest = memory.prefixes.oldest()
        cache.most_lines = cache.num_taken + cache.lines_per_state * len(cache.kept)
        assert not cache.has_room(1)
        memory._make_room()
        assert cache.may_keep and oldest not in memory.prefixes and len(memory.prefixes) == 2


def test_only_rows_that_are_used_become_the_most_recently_used():
    model, first, second = model_of("qwen3_next"), list(range(3, 38)) * 2, list(range(37, 3, -1)) * 2
    with Engine(model, drafting(), max_batch_size=2) as engine:
        assert reused(engine, model, first) == reused(engine, model, second) == 0
        prefixes = engine._memory.prefixes
        oldest = prefixes.oldest()
        assert prefixes.longest(np.array([*first, 3]), []).row is oldest is prefixes.oldest(), "it was looked for"
        assert reused(engine, model, [*first[:69], 39]) == 69
        assert prefixes.oldest() is not oldest and oldest in prefixes


def test_what_a_step_leaves_of_its_tokens_is_counted():
    """Keys, writes and windows of every token are there until it is known which ones are accepted."""
    model = model_of("qwen3_next")
    forward = packed_forward(model)
    cache, tree = forward.cache, DraftTree.chain(range(3, 19))
    rows = [forward.add(), forward.add()]
    forward.forward([RowInput(row, np.array([3]), tree) for row in rows])
    left = cache.num_state_bytes - 2 * cache.bytes_per_state
    forward.commit(rows, [(), ()])
    assert cache.num_state_bytes == 2 * cache.bytes_per_state
    assert bytes_of_one(model) == cache.bytes_per_state + left // 2 > cache.bytes_per_state


@pytest.mark.parametrize("target", ["llama", "qwen3_next", "bloom", "t5"])
def test_states_of_draft_models_are_counted(target):
    """Also where the target has none, or a forward for each of its rows."""
    model, draft = new_model(target), new_model("mamba2")
    per_request, bound = bytes_of_one(draft), 2**20
    source = DraftModelCandidates(draft)
    assert source.bytes_per_request() == per_request > 0 == source.bytes_per_token()
    for assistant, number in ((source, 1), (["suffix", draft], 1), (DraftModelCandidates(new_model("llama")), 0)):
        plain, drafted = [
            Engine(model, item, max_batch_size=4, max_kv_bytes=bound)._memory for item in ("none", assistant)
        ]
        if isinstance(drafted, EngineMemory):
            tokens = [memory.max_tokens * memory._bytes_per_line for memory in (plain, drafted)]
            assert 0 <= tokens[0] - tokens[1] - number * 4 * per_request < drafted._bytes_per_line
        else:
            assert drafted._states - plain._states == number * per_request
    with pytest.raises(ValueError, match=rf"One request's states take \d+ bytes, .* allows {per_request - 1}: raise"):
        Engine(new_model("llama"), source, max_kv_bytes=per_request - 1)


def test_a_bound_below_the_states_of_one_row_is_refused():
    model = model_of("qwen3_next")
    size = bytes_of_one(model)
    with pytest.raises(ValueError, match=rf"take {size} bytes, .*`max_kv_bytes` allows {size - 1}: raise it"):
        Engine(model, max_kv_bytes=size - 1)
    assert Engine(model, max_kv_bytes=2 * size)._memory.scheduler.max_batch_size == 1
