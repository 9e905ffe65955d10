"""The memory of beginnings that running requests have in common: there once, within its bound, as long as needed."""

import numpy as np
import pytest

from hf_smartspec import Engine
from hf_smartspec.serving.memory import prefix_cache
from hf_smartspec.target_model.cache import slot_cache
from hf_smartspec.target_model.cache.slabs import slot_size

from ...covering import exhaustive
from ...generate.helpers import VOCAB_SIZE, tiny_llama
from ..helpers import Asked, all_at_once, check_all, suffix
from .sharing import FIRST, LONG, PREFIX, alike, begin, check_rows, end, end_all

pytestmark = pytest.mark.usefixtures("together")
BYTES_PER_TOKEN = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, head_dim, float32


@pytest.fixture
def model():
    return tiny_llama()


def test_what_is_shared_lies_in_memory_once(model, monkeypatch):
    base = Asked(FIRST, {"max_new_tokens": 400, "eos_token_id": None})
    others = [Asked(item.prompt, {"max_new_tokens": 30, "eos_token_id": None}) for item in alike(12, longest=4)]
    copied, copy_lines = [], slot_cache.SlotCache._copy_lines

    def noting(cache, source, target, number):
        copied.append(number)
        copy_lines(cache, source, target, number)

    with Engine(model, "none") as engine:
        monkeypatch.setattr(slot_cache.SlotCache, "_copy_lines", noting)
        with all_at_once(engine):
            name = engine.add_request(base.prompt, **base.arguments)
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
        most, place = [], engine._memory.place
        engine._memory.place = lambda request, running: most.append(len(running)) or place(request, running)
        with all_at_once(engine):
            names = [engine.add_request(asked.prompt, **asked.arguments) for asked in (base, *others)]
        end_all(engine, model, [base, *others], names)
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
            asked = alike(14, seed=turn)
            mixed = [item for pair in zip(asked, strangers[turn : turn + 14]) for item in pair]
            check_all(engine, model, [base, *mixed])
            check_rows(engine)
            assert engine._memory.cache.num_lines <= max_tokens
    assert together


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


def test_what_is_left_of_a_dropped_sharer_is_that_of_its_request(model):
    """Whose hidden states sources may have: without it, they would not draft."""
    memory = Engine(model, suffix())._memory
    base = memory.cache.add(40)
    base.length = 40
    row = memory.cache.add(60, base, 24)
    memory.cache.remove(row)
    assert memory._still_cached(prefix_cache.SharedPrefix(row, 30, "a")) == (base, 24, "a")
