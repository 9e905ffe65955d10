"""Key/value memory of an engine: requests of all lengths beside one another, within a bound."""

import numpy as np
import pytest

from hf_smartspec import Engine
from hf_smartspec.candidates.base import NoCandidates
from hf_smartspec.serving.memory import kv_memory
from hf_smartspec.target_model.cache.slabs import slot_size
from hf_smartspec.target_model.cache.slot_cache import SlotCache

from ...covering import exhaustive
from ...generate.helpers import VOCAB_SIZE, tiny_llama
from ...watching import Watching
from ..helpers import TIMEOUT, Asked, all_alone, check_all, suffix

BYTES_PER_TOKEN = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, head_dim, float32


@pytest.fixture
def model():
    return tiny_llama()


@pytest.fixture
def laid_out(monkeypatch):
    """Lines before and after, of every time that all rows were laid out afresh."""
    changes, lay_out = [], SlotCache._lay_out

    def noting(cache, *args):
        before = cache.num_lines
        lay_out(cache, *args)
        changes.append((before, cache.num_lines))

    monkeypatch.setattr(SlotCache, "_lay_out", noting)
    return changes


def watched(engine: Engine) -> list[tuple[int, int]]:
    """How many requests run, and the bytes that are allocated, whenever another begins."""
    memory, seen = engine._runner.memory, []
    place = memory.place

    def noting(request, running):
        place(request, running)
        seen.append((len(running) + 1, memory.num_bytes))

    memory.place = noting
    return seen


def requests_of(lengths, seed: int = 0, max_new_tokens: int = 12) -> list[Asked]:
    rng = np.random.default_rng(seed)
    settings = {"max_new_tokens": max_new_tokens, "eos_token_id": None}
    return [Asked(rng.integers(3, VOCAB_SIZE, length).tolist(), settings) for length in lengths]


def test_a_long_request_does_not_shorten_the_others(model):
    """Rows have slots of different sizes: in a rectangle, three rows of its length would fill the memory."""
    asked = requests_of([380, *[20] * 10])
    with Engine(model, "none", max_batch_size=16, max_kv_bytes=(512 + 10 * 64) * BYTES_PER_TOKEN) as engine:
        seen = watched(engine)
        with engine.pause():
            names = [engine.add_request(item.prompt, **item.arguments) for item in asked]
        outputs = [engine.get_result(name, timeout=TIMEOUT) for name in names]
        assert engine._memory.num_bytes <= (512 + 10 * 64) * BYTES_PER_TOKEN
    assert [output.generated_tokens for output in outputs] == all_alone(model, asked)
    assert max(num for num, _ in seen) == 11


@pytest.mark.parametrize("max_tokens", [*exhaustive([700]), 1500])
def test_lengths_that_come_and_go_stay_within_the_bound(model, laid_out, max_tokens):
    """Whatever holes they leave: slots fit as long as their sum does."""
    lengths = np.random.default_rng(1).integers(5, 400, 40)
    with Engine(model, suffix(), max_batch_size=8, max_kv_bytes=max_tokens * BYTES_PER_TOKEN) as engine:
        seen = watched(engine)
        check_all(engine, model, requests_of(lengths))
        assert engine.statistics.drafted_tokens > 0
    assert max(num_bytes for _, num_bytes in seen) <= max_tokens * BYTES_PER_TOKEN
    assert any(before == after for before, after in laid_out), "rows were moved together"
    assert max(num for num, _ in seen) > 1


def test_rows_stay_where_they_are_while_requests_run(model, monkeypatch):
    """Their lengths are known beforehand."""
    moved = []
    monkeypatch.setattr(SlotCache, "_enlarge", lambda cache, capacities: moved.append(capacities))
    with Engine(model, suffix(), max_batch_size=4) as engine:
        check_all(engine, model, requests_of([5, 90, 40, 200, 7], max_new_tokens=60))
    assert not moved


def test_kept_rows_are_given_up_for_running_ones_the_oldest_first(model):
    first, second, third = requests_of([60, 60, 150])
    size = slot_size(60 + 12 + 16)
    with Engine(model, "none", max_kv_bytes=(2 * size + 100) * BYTES_PER_TOKEN) as engine:
        memory = engine._memory
        check_all(engine, model, [first])
        check_all(engine, model, [second])
        assert len(memory.prefixes) == 2
        check_all(engine, model, [third])  # leaves room for one of them
        reused = memory.num_reused
        check_all(engine, model, [first])
        assert memory.num_reused == reused, "it was the oldest"


def test_a_kept_row_that_fills_the_memory_becomes_that_of_the_request(model):
    """Nothing is left to copy its text to."""
    (first,) = requests_of([80])
    longer = Asked(first.prompt + [5] * 90, first.settings)
    with Engine(model, "none", max_kv_bytes=slot_size(198) * BYTES_PER_TOKEN) as engine:
        for asked in (first, longer, first):
            check_all(engine, model, [asked])
            assert engine._memory.num_bytes <= slot_size(198) * BYTES_PER_TOKEN
        assert engine._memory.num_reused == 80 + 79


def test_memory_is_given_back_when_little_is_needed(model, monkeypatch):
    monkeypatch.setattr(kv_memory, "_RECENT", 8)
    long, *short = requests_of([5000, *[10] * 9], max_new_tokens=2)
    with Engine(model, "none", max_batch_size=1, max_kv_bytes=2**25) as engine:
        check_all(engine, model, [long])
        most = engine._memory.num_bytes
        check_all(engine, model, short[:7])
        assert engine._memory.num_bytes >= most, "the long one may be asked for more"
        check_all(engine, model, short)
        assert engine._memory.num_bytes <= most / 4
        address = engine._memory.cache.layers[0].keys.data_ptr()
        check_all(engine, model, short * 3)
        assert engine._memory.cache.layers[0].keys.data_ptr() == address


def test_chats_begin_where_they_stopped_though_a_short_request_came_alone(model):
    """Their keys and values are many times what runs then."""
    chats, (alone,) = requests_of([200] * 12), requests_of([10])
    with Engine(model, "none", max_batch_size=2) as engine:
        check_all(engine, model, chats)
        check_all(engine, model, [alone])
        reused = engine._memory.num_reused
        check_all(engine, model, chats)
        assert engine._memory.num_reused == reused + 12 * 199


def test_a_request_that_cannot_be_placed_leaves_no_row(model, monkeypatch):
    first, second = requests_of([40, 40])
    with Engine(model, "none", max_batch_size=4) as engine:
        check_all(engine, model, [first])
        cache = engine._memory.cache

        def fail(*_):
            raise MemoryError("no room for a copy")

        with monkeypatch.context() as patch:
            patch.setattr(cache, "copy", fail)
            output = engine.get_result(engine.add_request(first.prompt, **first.arguments), timeout=TIMEOUT)
            assert "no room for a copy" in str(output.error)
        cache = engine._memory.cache
        assert len(cache.rows) == len(engine._memory.prefixes)
        check_all(engine, model, [first, second])


@pytest.mark.parametrize("max_batch_size", [32, 2])
def test_texts_are_kept_however_few_requests_run(model, max_batch_size):
    asked = requests_of([60] * 12)
    with Engine(model, "none", max_batch_size=max_batch_size) as engine:
        check_all(engine, model, asked)
        assert len(engine._memory.prefixes) == 12
        for item in asked:
            check_all(engine, model, [item])
        assert engine._memory.num_reused == 12 * 59


def test_full_memory_rather_forgets_than_moves(model, laid_out):
    """This holds for new slots of any size."""
    asked = requests_of([20, 150, 60, 300, 40, 90] * 6, max_new_tokens=8)
    with Engine(model, "none", max_batch_size=2, max_kv_bytes=1500 * BYTES_PER_TOKEN) as engine:
        check_all(engine, model, asked[:12])
        cache = engine._memory.cache
        assert cache.num_lines == cache.most_lines
        laid_out.clear()
        check_all(engine, model, asked[12:])
        assert not laid_out and len(engine._memory.prefixes) > 4
        reused = engine._memory.num_reused
        check_all(engine, model, asked[-3:])
        assert engine._memory.num_reused > reused, "also of rows that have been moved"


def test_few_texts_are_kept_of_which_sources_keep_something_too(model):
    asked = requests_of([30] * 7, max_new_tokens=8)
    watching = Watching(NoCandidates(), layers=(-1,))
    with Engine(model, watching, max_batch_size=2) as engine:
        for item in asked:
            check_all(engine, model, [item])
            assert 1 <= len(engine._memory.prefixes) <= 2


def test_texts_of_which_sources_keep_something_cost_others_no_place(model):
    plain, watched = requests_of([30] * 12), requests_of([30] * 7, seed=1)
    watching = Watching(NoCandidates(), layers=(-1,))
    with Engine(model, "none", max_batch_size=2) as engine:
        check_all(engine, model, plain)
        for item in watched:
            output = engine.get_result(
                engine.add_request(item.prompt, assistant=watching, **item.arguments), timeout=TIMEOUT
            )
            assert output.generated_tokens == item.alone(model)
        assert len(engine._memory.prefixes) in (12 + 1, 12 + 2)
        check_all(engine, model, plain)
        assert engine._memory.num_reused == 12 * 29


def test_of_a_conversation_the_last_turn_is_kept(model):
    """And of a prompt that comes again and again, one text."""
    first, other = requests_of([40, 30])
    with Engine(model, "none", max_batch_size=4) as engine:
        text = first.prompt
        for turn in range(4):
            output = engine.get_result(engine.add_request(text, **first.arguments), timeout=TIMEOUT)
            assert output.generated_tokens == Asked(text, first.settings).alone(model)
            text = [*text, *output.generated_tokens, turn + 3, 7]
        for _ in range(5):
            check_all(engine, model, [other])
        assert len(engine._memory.prefixes) <= 2 + 1, "what the last one covers is given up when the next one begins"
        reused = engine._memory.num_reused
        check_all(engine, model, [Asked(text, first.settings)])
        assert engine._memory.num_reused - reused == len(text) - 3, "all but the answer's end and what is new"


def test_kept_texts_give_way_where_memory_cannot_grow(model, monkeypatch):
    """There may be less than the bound says: it is no request that pays for it, but what was kept."""
    asked = requests_of([60] * 24, max_new_tokens=8)
    with Engine(model, "none", max_batch_size=2) as engine:
        check_all(engine, model, asked[:6])
        lay_out, most = SlotCache._lay_out, engine._memory.cache.num_lines

        def short_of_memory(cache, capacities, num_lines=None):
            if (num_lines or cache._enough(cache.num_taken + sum(capacities.values()))) > most:
                raise RuntimeError("out of memory")
            lay_out(cache, capacities, num_lines)

        monkeypatch.setattr(SlotCache, "_lay_out", short_of_memory)
        check_all(engine, model, asked[6:])
        assert engine._memory.cache.num_lines == most
