"""Long beginnings that running requests have in common: they lie in memory once, and are read once for all."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from hf_smartspec import DraftModelCandidates, EarlyExitCandidates, Engine, EngineOutput, SmartSpecConfig
from hf_smartspec.candidates.base import NoCandidates
from hf_smartspec.cpu.attention import has_attention
from hf_smartspec.goodput import FixedLength
from hf_smartspec.serving.memory import prefix_cache
from hf_smartspec.target_model.attention import tree_attention as attention
from hf_smartspec.target_model.cache import slot_cache
from hf_smartspec.target_model.cache.slabs import slot_size
from hf_smartspec.target_model.written.compiled import CompiledDecoder

from ...covering import exhaustive
from ...generate.helpers import VOCAB_SIZE, noisy_copy, tiny_llama
from ...models import new_model, noisy_model, shared_model
from ...watching import Watching
from ..helpers import SETTINGS, TIMEOUT, Asked, all_alone, check_all, suffix

BYTES_PER_TOKEN = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, head_dim, float32
PREFIX = np.random.default_rng(5).integers(3, VOCAB_SIZE, 90).tolist()
FIRST = [*PREFIX, 4, 9]
LONG = {"max_new_tokens": 120, "eos_token_id": None}
LONGER = {"max_new_tokens": 300, "eos_token_id": None}  # for what is to happen before they end


@pytest.fixture
def model():
    return tiny_llama()


@pytest.fixture(autouse=True)
def together(monkeypatch):
    """Short beginnings are shared, too; what is shared in every call of attention: how many of columns and tokens."""
    monkeypatch.setattr(prefix_cache, "LEAST_SHARED", 24)
    monkeypatch.setattr(prefix_cache, "LEAST_SAVED", 0)
    monkeypatch.setattr(prefix_cache, "_STEP", 8)
    seen, attend = [], attention.shared_attention

    def noting(packed, key, value, layout, *args):
        seen.append([(part.num_columns, len(part.tokens)) for part in layout.shared])
        return attend(packed, key, value, layout, *args)

    def run(compiled, given, *args):
        if given.layout.shared:
            seen.append([(part.num_columns, len(part.tokens)) for part in given.layout.shared])
        return run_program(compiled, given, *args)

    run_program = CompiledDecoder.run
    monkeypatch.setattr(attention, "shared_attention", noting)
    monkeypatch.setattr(CompiledDecoder, "run", run)
    return seen


def alike(count: int, seed: int = 0, prefix: list[int] = PREFIX, longest: int = 20, **settings) -> list[Asked]:
    """Requests of all settings whose prompts begin alike."""
    rng = np.random.default_rng(seed)
    asked = []
    for index in range(count):
        own = rng.integers(3, VOCAB_SIZE, rng.integers(1, longest)).tolist()
        given = {"max_new_tokens": int(rng.integers(2, 20))} | SETTINGS[index % len(SETTINGS)] | settings
        asked.append(Asked(prefix + own, given, int(rng.integers(1000)) if given.get("do_sample") else None))
    return asked


_fetched: dict[str, EngineOutput] = {}


def begin(engine: Engine, asked: Asked) -> str:
    """A request that has come to its first token; on a busy machine, perhaps to its end, which is thereby fetched."""
    name = engine.add_request(asked.prompt, streaming=True, **asked.arguments)
    output = next(engine.request_id_iter(name))
    if output.is_finished():
        _fetched[name] = output
    return name


@contextmanager
def all_at_once(engine: Engine) -> Iterator[None]:
    """Let the requests that are added within begin in one step, beside the running ones."""
    memory = engine._memory
    following, memory.next = memory.next, lambda *_: None
    yield
    memory.next = following


def end(engine: Engine, model, asked: Asked, name: str) -> None:
    output = _fetched.pop(name, None) or engine.get_result(name, timeout=TIMEOUT)
    assert output.error is None and output.generated_tokens == asked.alone(model)


def end_all(engine: Engine, model, requests: list[Asked], names: list[str]) -> None:
    all_alone(model, requests)  # in few calls
    for asked, name in zip(requests, names):
        end(engine, model, asked, name)


def check_rows(engine: Engine) -> None:
    """Nothing runs: every row is a kept one, and those in which others begin know how many these are."""
    memory = engine._memory
    rows = memory.cache.rows
    assert len(rows) == len(memory.prefixes) and all(row in memory.prefixes for row in rows)
    for row in rows:
        assert row.num_sharers == sum(other.prefix_row is row for other in rows)
        assert row.prefix_row is None or (row.prefix_row in rows and row.prefix_row.prefix_row is None)


SOURCES = {
    "none": lambda model: "none",
    "suffix": lambda model: suffix(),
    "draft": lambda model: DraftModelCandidates(noisy_copy(model), num_nodes=4),
    "tree": lambda model: DraftModelCandidates(noisy_copy(model), num_nodes=8, width=3),
    "early exit": lambda model: EarlyExitCandidates(model, num_layers=1, num_nodes=4),
}


@pytest.mark.parametrize("max_prefill_tokens", [7, 512])
@pytest.mark.parametrize("source", SOURCES)
def test_requests_that_join_one_that_runs(model, together, source, max_prefill_tokens):
    base = Asked(FIRST, LONG)
    with Engine(model, SOURCES[source](model), max_prefill_tokens=max_prefill_tokens) as engine:
        name = begin(engine, base)
        check_all(engine, model, alike(14))
        end(engine, model, base, name)
        assert source == "none" or engine.statistics.accepted_tokens > 0
        check_rows(engine)
    assert max(len(parts) for parts in together) == 1, "all share one beginning"
    assert max(num for parts in together for _, num in parts) > 8


@pytest.mark.parametrize(
    "architecture", ["llama", "gpt2", *exhaustive(["smollm3"], ["qwen2"], ["qwen3"], ["opt"], ["gpt_bigcode"])]
)
def test_architectures(together, architecture):
    model, base = shared_model(architecture), Asked(FIRST, LONG)
    source = DraftModelCandidates(noisy_model(architecture, noise=0.01), num_nodes=6, width=2)
    with Engine(model, source) as engine:
        name = begin(engine, base)
        check_all(engine, model, alike(8))
        end(engine, model, base, name)
    assert together


@pytest.mark.skipif(not has_attention(torch.float32), reason="there is no compiled attention for this CPU")
def test_compiled_decoders(together):
    model, base = new_model("llama", head_dim=16), Asked(FIRST, LONG)
    drafter = DraftModelCandidates(noisy_copy(model), width=2)
    with Engine(model, SmartSpecConfig(drafter, num_nodes=3)) as engine:  # as many nodes, whatever a step takes
        name = begin(engine, base)
        check_all(engine, model, alike(8, max_new_tokens=24))
        end(engine, model, base, name)
    assert len(together) > 10


@pytest.mark.parametrize("architecture", ["gemma3_text", *exhaustive(["starcoder2"], ["gemma2"], ["mistral"])])
def test_models_that_do_not_see_everything_alike_copy(together, architecture):
    model, base = shared_model(architecture), Asked(FIRST, LONG)
    with Engine(model, suffix()) as engine:
        name = begin(engine, base)
        check_all(engine, model, alike(4))
        end(engine, model, base, name)
        assert engine._memory.num_reused >= 4 * len(PREFIX)
    assert not together


def test_sources_that_keep_hidden_states_beside_copy(model, together):
    watching, base = Watching(NoCandidates(), layers=(-1,)), Asked(FIRST, LONG)
    with Engine(model, watching) as engine:
        name = begin(engine, base)
        check_all(engine, model, alike(3))
        end(engine, model, base, name)
    assert not together


def test_what_is_shared_lies_in_memory_once(model, monkeypatch):
    base = Asked(FIRST, {"max_new_tokens": 400, "eos_token_id": None})
    others = [Asked(item.prompt, {"max_new_tokens": 30, "eos_token_id": None}) for item in alike(12, longest=4)]
    copied, copy_lines = [], slot_cache.SlotCache._copy_lines

    def noting(cache, source, target, number):
        copied.append(number)
        copy_lines(cache, source, target, number)

    with Engine(model, "none") as engine:
        name = begin(engine, base)
        with all_at_once(engine):
            monkeypatch.setattr(slot_cache.SlotCache, "_copy_lines", noting)
            names = [engine.add_request(asked.prompt, streaming=True, **asked.arguments) for asked in others]
        next(engine.request_id_iter(names[-1]))
        with engine.pause():
            memory, rows = engine._memory, [call.requests[0].cache_row for call in engine._runner.loop.calls]
            assert len(rows) == 13 and [row.prefix_row for row in rows[1:]] == rows[:1] * 12
            assert sum(copied) < 12 * 8, "the tokens after the last multiple"
            need = slot_size(len(base.prompt) + 400) + 12 * slot_size(3 + 2 + 30)
            assert memory.cache.num_taken == memory.scheduler.num_taken == need
            read = memory.forward.padded_context(rows)
            assert read <= 13 * 60 + rows[0].length + 3 * memory.forward._call, "once for all of them"
        end_all(engine, model, others, names)
        engine.cancel_request(name)


def test_more_requests_run_than_copies_would_fit(model):
    base, others = Asked(FIRST, LONG), alike(8, longest=4, max_new_tokens=30, eos_token_id=None)
    need = slot_size(len(PREFIX) + 2 + 120) + 8 * slot_size(3 + 2 + 30)
    with Engine(model, "none", max_kv_bytes=need * BYTES_PER_TOKEN) as engine:
        name = begin(engine, base)
        most, place = [], engine._memory.place
        engine._memory.place = lambda request, running: most.append(len(running)) or place(request, running)
        with all_at_once(engine):
            names = [engine.add_request(asked.prompt, **asked.arguments) for asked in others]
        end_all(engine, model, [base, *others], [name, *names])
        assert engine._memory.cache.num_lines <= need
    assert max(most) == 8


@pytest.mark.parametrize("max_tokens", [420, *exhaustive([700])])
def test_memory_that_is_full(model, together, max_tokens):
    """Rows move, are laid out afresh and give way, while others begin in them."""
    base = Asked(FIRST, LONG)
    rng = np.random.default_rng(1)
    strangers = [
        Asked(rng.integers(3, VOCAB_SIZE, n).tolist(), {"max_new_tokens": 9}) for n in rng.integers(5, 180, 20)
    ]
    with Engine(model, suffix(), max_batch_size=8, max_kv_bytes=max_tokens * BYTES_PER_TOKEN) as engine:
        for turn in range(3):
            name = begin(engine, base)
            asked = alike(14, seed=turn)
            mixed = [item for pair in zip(asked, strangers[turn : turn + 14]) for item in pair]
            check_all(engine, model, mixed)
            end(engine, model, base, name)
            check_rows(engine)
            assert engine._memory.cache.num_lines <= max_tokens
    assert together


@pytest.mark.parametrize("max_prefill_tokens", [20, 512])
def test_what_requests_that_come_together_begin_with_is_read_once(model, together, max_prefill_tokens):
    """The first request reads it; the others wait for that, unless the first one is cancelled."""
    asked = alike(9, max_new_tokens=40, eos_token_id=None)
    with Engine(model, suffix(), max_prefill_tokens=max_prefill_tokens) as engine:
        for is_cancelled in (False, True):
            reused = engine._memory.num_reused
            with all_at_once(engine):
                names = [engine.add_request(item.prompt, **item.arguments) for item in asked]
                if is_cancelled:
                    engine.cancel_request(names[0])
            end_all(engine, model, asked[is_cancelled:], names[is_cancelled:])
            assert engine._memory.num_reused - reused >= (8 - is_cancelled) * len(PREFIX)
            check_rows(engine)
    assert max(num for parts in together for _, num in parts) >= 9


@pytest.mark.parametrize("num_alike", [12, 60, *exhaustive([20], [89])])
def test_a_kept_sharer_is_no_place_for_a_prompt_that_begins_otherwise(model, together, num_alike):
    """Memory is full when it comes, and the row that has least of it in common with others begins in another's."""
    rng = np.random.default_rng(num_alike)

    def others(num: int) -> list[int]:
        return rng.integers(3, VOCAB_SIZE, num).tolist()

    base, stranger = Asked(FIRST, LONG | {"max_new_tokens": 80}), Asked(others(140), LONG | {"max_new_tokens": 40})
    kept = Asked(PREFIX + others(210), LONG | {"max_new_tokens": 1})
    last = Asked(PREFIX[:num_alike] + others(190), LONG | {"max_new_tokens": 20})
    with Engine(model, "none", max_kv_bytes=640 * BYTES_PER_TOKEN) as engine:
        names = [begin(engine, base)]
        names += [engine.add_request(asked.prompt, **asked.arguments) for asked in (kept, stranger, last)]
        end_all(engine, model, [base, kept, stranger, last], names)
        check_rows(engine)
    assert any(together)


def test_memory_stays_within_its_bound_where_a_kept_sharer_would_be_used_again(model, together):
    runs = Asked(np.random.default_rng(1).integers(3, VOCAB_SIZE, 60).tolist(), LONG | {"max_new_tokens": 600})
    base, kept = Asked(FIRST, LONG | {"max_new_tokens": 80}), Asked([*PREFIX, 7, 7], LONG | {"max_new_tokens": 4})
    again = Asked([*PREFIX, 7, 7, 5, 9, 4], LONG | {"max_new_tokens": 80})
    with Engine(model, "none", max_kv_bytes=1000 * BYTES_PER_TOKEN) as engine:
        first, name = begin(engine, runs), begin(engine, base)
        end(engine, model, kept, engine.add_request(kept.prompt, **kept.arguments))
        end(engine, model, base, name)
        end(engine, model, again, engine.add_request(again.prompt, **again.arguments))
        assert engine._memory.cache.num_lines <= 1000
        engine.cancel_request(first)
    assert any(together)


def test_early_exit_drafts_for_rows_that_begin_in_others(model, together):
    base, sharer = Asked(FIRST, LONG), Asked([*PREFIX, 7, 7], LONG | {"max_new_tokens": 40})
    source = SmartSpecConfig(EarlyExitCandidates(model, num_layers=1, num_nodes=4), policy=FixedLength(4))
    with Engine(model, source) as engine:
        name = begin(engine, base)
        output = engine.get_result(engine.add_request(sharer.prompt, **sharer.arguments), timeout=TIMEOUT)
        assert output.generated_tokens == sharer.alone(model)
        assert output.statistics.drafted_tokens > 40
        end(engine, model, base, name)
    assert any(together)


def test_a_base_that_ends_first_stays_as_long_as_it_is_needed(model, together):
    base = Asked(FIRST, {"max_new_tokens": 20, "eos_token_id": None})
    longer = alike(3, max_new_tokens=100, eos_token_id=None)
    size = slot_size(len(PREFIX) + 2 + 20)
    with Engine(model, "none", max_kv_bytes=(size + 4 * 192 + 500) * BYTES_PER_TOKEN) as engine:
        name = begin(engine, base)
        names = [engine.add_request(asked.prompt, **asked.arguments) for asked in longer]
        end(engine, model, base, name)
        check_all(engine, model, [Asked([7] * 300, {"max_new_tokens": 4}), *alike(5, seed=3)])
        end_all(engine, model, longer, names)
        check_rows(engine)
        check_all(engine, model, [Asked([7] * 800, {"max_new_tokens": 4})])
        check_rows(engine)
        assert len(engine._memory.prefixes) < 4, "nobody needs it any more"
    assert together


def test_requests_that_are_cancelled(model, together):
    base, others = Asked(FIRST, LONGER), alike(6, **LONGER)
    with Engine(model, suffix()) as engine:
        name = begin(engine, base)
        names = [begin(engine, asked) for asked in others]
        for gone in (name, *names[:3]):
            engine.cancel_request(gone)
            assert engine.get_result(gone, timeout=TIMEOUT).error
        check_all(engine, model, alike(4, seed=2))
        end_all(engine, model, others[3:], names[3:])
        check_rows(engine)
    assert together


def test_prompts_that_share_much_and_little(model, together):
    """A prompt shares the first row's beginning in place, and copies what it has in common with another row only."""
    base, other = Asked(FIRST, LONG), alike(1, longest=3, max_new_tokens=100, eos_token_id=None)[0]
    other.prompt += np.random.default_rng(8).integers(3, VOCAB_SIZE, 60).tolist()
    with Engine(model, suffix()) as engine:
        names = [begin(engine, base), begin(engine, other)]
        reused = engine._memory.num_reused
        asked = [
            Asked([*other.prompt, 5, 6, 7], {"max_new_tokens": 8}),
            Asked([*PREFIX[:50], 8], {"max_new_tokens": 8}),
        ]
        check_all(engine, model, asked)
        assert engine._memory.num_reused - reused == len(other.prompt) + 50
        end_all(engine, model, [base, other], names)
        check_rows(engine)
    assert {88, 48} <= {columns for parts in together for columns, _ in parts}


def test_what_is_left_of_a_dropped_sharer_is_that_of_its_request(model):
    """Whose hidden states sources may have: without it, they would not draft."""
    memory = Engine(model, suffix())._memory
    base = memory.cache.add(40)
    base.length = 40
    row = memory.cache.add(60, base, 24)
    memory.cache.remove(row)
    assert memory._still_cached(prefix_cache.SharedPrefix(row, 30, "a")) == (base, 24, "a")


def test_namespaces_do_not_share(model, together):
    base = Asked(FIRST, LONG)
    with Engine(model, suffix()) as engine:
        name = begin(engine, base)
        asked = Asked([*PREFIX, 6], {"max_new_tokens": 5})
        mine = SmartSpecConfig(suffix(), namespace="mine")
        output = engine.get_result(engine.add_request(asked.prompt, assistant=mine, **asked.arguments), timeout=TIMEOUT)
        assert output.generated_tokens == asked.alone(model)
        end(engine, model, base, name)
    assert not together


@pytest.mark.parametrize("base_runs", [True, *exhaustive([False])])
def test_weights_that_change_while_rows_share(model, together, base_runs):
    """The shared beginning is computed anew, before the tokens that attend to it."""
    other = tiny_llama(seed=7)
    base = Asked(FIRST, {"max_new_tokens": 300 if base_runs else 30, "eos_token_id": None})
    others = [Asked(item.prompt, {"max_new_tokens": 300, "eos_token_id": None}) for item in alike(3)]
    with Engine(model, "none") as engine:
        first = begin(engine, base)
        names = [begin(engine, asked) for asked in others]
        if not base_runs:
            assert engine.get_result(first, timeout=TIMEOUT).error is None
            kept = len(engine._memory.prefixes)
            assert kept == 1
        with engine.pause():
            model.load_state_dict(other.state_dict())
            requests = [call.requests[0] for call in engine._runner.loop.calls]
            assert len(requests) == 3 + base_runs, "some ended before the pause"
            known = {tuple(request.prompt): request.tokens.copy() for request in requests}
        together.clear()
        for asked, name in zip([base] * base_runs + others, [first] * base_runs + names):
            output = engine.get_result(name, timeout=TIMEOUT)
            begun = known[tuple(asked.prompt)]
            left = asked.settings["max_new_tokens"] - len(begun)
            rest = Asked(asked.prompt + begun, {"max_new_tokens": left, "eos_token_id": None})
            assert output.generated_tokens == begun + rest.alone(model)
        assert together
        check_rows(engine)
        check_all(engine, model, alike(3, seed=9))


def test_what_is_shared_and_cannot_be_computed_anew(model, monkeypatch):
    base, asked = Asked(FIRST, LONGER), alike(1, **LONGER)[0]
    with Engine(model, "none") as engine:
        names = [begin(engine, base), begin(engine, asked)]
        forward = engine._memory.forward
        plain, calls = forward.forward, []

        def fail(inputs):
            calls.append(inputs)
            if len(calls) == 1:
                raise torch.OutOfMemoryError("no memory")
            return plain(inputs)

        with engine.pause(), torch.no_grad():
            model.lm_head.weight.mul_(1.5)
            monkeypatch.setattr(forward, "forward", fail)
        for name in names:
            assert "no memory" in engine.get_result(name, timeout=TIMEOUT).error
        check_all(engine, model, [base, *alike(3)])
        check_rows(engine)
