"""Long beginnings that running requests have in common: they lie in memory once, and are read once for all."""

import numpy as np
import pytest
import torch

from hf_smartspec import DraftModelCandidates, EarlyExitCandidates, Engine, SmartSpecConfig
from hf_smartspec.candidates.base import NoCandidates
from hf_smartspec.cpu.attention import has_attention
from hf_smartspec.goodput import FixedLength

from ...covering import exhaustive
from ...generate.helpers import VOCAB_SIZE, noisy_copy, tiny_llama
from ...models import GEMMA_4, new_model, noisy_model, shared_model
from ...watching import Watching
from ..helpers import TIMEOUT, Asked, all_at_once, check_all, suffix
from .sharing import FIRST, LONG, LONGER, PREFIX, alike, begin, check_rows, end, end_all

pytestmark = pytest.mark.usefixtures("together")


@pytest.fixture
def model():
    return tiny_llama()


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


@pytest.mark.parametrize(
    "architecture", ["gemma3_text", *GEMMA_4[1:2], *exhaustive(["starcoder2"], ["gemma2"], ["mistral"])]
)
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
