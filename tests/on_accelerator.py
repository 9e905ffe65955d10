"""
The same tokens on an accelerator as on the CPU, and what a step asks of it: operations that are dispatched, uploads,
and times that the host waits for it. `test_accelerator.py` runs this file in a process of its own.
"""

from collections import Counter
from itertools import product

import pytest
import torch

import hf_smartspec
from hf_smartspec import SmartSpecConfig, device
from hf_smartspec.decoding import verify
from hf_smartspec.decoding.loop import DecodingLoop
from hf_smartspec.sampling import noise
from hf_smartspec.target_model.forward.packed import PackedForward
from hf_smartspec.target_model.graphs import recorder
from hf_smartspec.target_model.model_state import state_of
from hf_smartspec.target_model.written.decoder import WrittenDecoder
from hf_smartspec.target_model.written.recognition import make_plan
from hf_smartspec.target_model.written.trial import check

from .accelerator import DEVICE, Accelerator, Recorder
from .accelerator_cases import (
    CHAIN,
    LENGTHS,
    LEVELS,
    NUM_TOKENS,
    OPTIONS,
    TREE,
    WIDTH,
    check_counts,
    generate,
    tokens_of,
)
from .candidates.models.translated.pairs import character_tokenizer, with_tokens_of
from .covering import IS_EXHAUSTIVE, covering, exhaustive
from .generate.helpers import noisy_copy, prompts, tiny_llama, tiny_tokenizer
from .models import new_model

pytestmark = pytest.mark.usefixtures("every_trial")
SOME_OPTIONS = "greedy", "warped", "penalty, sampled"


# All options with the first sources, some with the last; of these, each source and each set of options once.
_ALL = [
    *product(["none", "lookup", "tree", "chain", "priced"], OPTIONS),
    *product(["suffix", "auto", "two"], SOME_OPTIONS),
]
_FEW = [_ALL[place] for place in covering(_ALL)]
CASES = [*_FEW, *exhaustive(*(case for case in _ALL if case not in _FEW))]


@pytest.fixture(scope="module", autouse=True)
def without_inference_mode():
    """Which the emulated device does not know: decoders that are written out do without."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "inference_mode", lambda mode=True: torch.no_grad())
        yield


@pytest.fixture
def recorders(on_device, monkeypatch):
    """The device records; all that do so, in the order of the forwards that have them."""
    made: list[Recorder] = []

    def make(device):
        made.append(Recorder(device))
        return made[-1]

    monkeypatch.setitem(recorder._RECORDERS, DEVICE, make)
    for model in on_device:
        state_of(model).memory = None  # and what other tests have recorded
    yield made
    for model in on_device:
        state_of(model).memory = None


@pytest.fixture(scope="module")
def on_cpu():
    target = tiny_llama(eos_token_id=None)
    target.generation_config.eos_token_id = None
    return target, noisy_copy(target, 0.03)


@pytest.fixture(scope="module")
def on_device(on_cpu):
    with Accelerator():
        return [noisy_copy(model, 0.0).to(DEVICE) for model in on_cpu]


@pytest.fixture(scope="module")
def expected(on_cpu):
    """Of every kind of options, what the CPU generates without drafts."""
    return {name: generate(on_cpu, "none", options) for name, options in OPTIONS.items()}


@pytest.fixture
def accelerator():
    with Accelerator() as accelerator:
        yield accelerator


@pytest.fixture
def steps(accelerator, monkeypatch):
    """What is counted in every step of the decoding loop, and the length of its longest accepted path."""
    counted: list[Counter] = []
    step, commit = DecodingLoop.step, DecodingLoop.commit

    def counting(loop):
        with accelerator.counting() as counts:
            ended = step(loop)
        counted[-1].update(counts)
        return ended

    def noting(loop, rows):
        counted.append(Counter(accepted=max(len(request.path) for request in rows)))
        return commit(loop, rows)

    monkeypatch.setattr(DecodingLoop, "step", counting)
    monkeypatch.setattr(DecodingLoop, "commit", noting)
    return counted


@pytest.mark.parametrize(("source", "name"), CASES)
def test_devices_agree_and_are_hardly_waited_for(on_device, expected, steps, source, name):
    output = generate(on_device, source, OPTIONS[name])
    assert output.sequences.device.type == DEVICE
    assert tokens_of(output) == tokens_of(expected[name])
    if source not in ("none", "auto"):
        assert output.statistics.drafted_tokens > 0
    if source in LEVELS:
        assert output.statistics.accepted_tokens > 0
    for own, others in zip(output.scores or (), expected[name].scores or ()):
        torch.testing.assert_close(own.cpu(), others, rtol=1e-4, atol=1e-4)
    check_counts(steps, source, name)


@pytest.mark.parametrize("source", ["lookup", "priced", *exhaustive(["none"], ["chain"], ["tree"])])
def test_what_comes_again_is_one_launch(on_cpu, on_device, steps, recorders, source):
    """Of a single row, whose forwards have few shapes; what else a step has to do is as before."""
    name = "warped" if source in ("lookup", "priced") else "greedy"
    expected = tokens_of(generate(on_cpu, "none", OPTIONS[name], lengths=(9,)))
    dispatched, recorded = [], []
    for _ in range(5):
        steps.clear()
        assert tokens_of(generate(on_device, source, OPTIONS[name], lengths=(9,))) == expected
        dispatched.append(sum(counts["dispatched"] for counts in steps))
        recorded.append(sum(item.num_recorded for item in recorders))
    assert sum(item.num_replays for item in recorders) > 8 and dispatched[-1] < dispatched[0] - 200
    assert 0 < recorded[2] == recorded[-1], "what was recorded is kept with the memory"
    check_counts(steps, source, name)


@pytest.mark.parametrize("source", ["suffix", "tree", *exhaustive(["lookup"], ["chain"], ["rejection"], ["priced"])])
def test_recorded_forwards_of_many_rows(on_cpu, on_device, recorders, accelerator, source):
    options = OPTIONS["penalty" if source in ("lookup", "priced") else "sampled"] | {"max_new_tokens": 30}
    expected = generate(on_cpu, source, options)
    for _ in range(2):
        assert tokens_of(generate(on_device, source, options)) == tokens_of(expected)
    assert sum(item.num_recorded for item in recorders) > 0


@pytest.mark.parametrize("architecture", ["mistral", "gemma3_text"])
def test_sliding_windows_are_no_reason_to_wait(accelerator, steps, architecture):
    """Of trees, too: what a window hides depends on positions, which are not those of the columns."""
    target = new_model(architecture, eos_token_id=None)
    target.generation_config.eos_token_id = None
    assert target.config.sliding_window < min(LENGTHS) + NUM_TOKENS
    models = target, noisy_copy(target, 0.03)
    expected = tokens_of(generate(models, "none", {}))
    on_device = [noisy_copy(model, 0.0).to(DEVICE) for model in models]
    for source in ("tree", "chain"):
        steps.clear()
        output = generate(on_device, source, {})
        assert tokens_of(output) == expected and output.statistics.accepted_tokens > 0
        check_counts(steps, source, "greedy", dispatched=220)  # two kinds of layers have two masks


@pytest.mark.parametrize("architecture", ["t5", *exhaustive(["umt5"]), "bart"])
def test_encoders_are_no_reason_to_wait(accelerator, steps, architecture):
    """Biases of positions, and who sees which encoder outputs, the device works out, or is sent with the layout."""
    models = new_model(architecture), new_model(architecture)
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.mul_(1.02)
    few = [("sampled", "lookup"), ("greedy", "tree")]
    for name, source in product(("greedy", "sampled"), ("lookup", "tree", "chain")) if IS_EXHAUSTIVE else few:
        expected = tokens_of(generate(models, "none", OPTIONS[name]))
        on_device = [noisy_copy(model, 0.0).to(DEVICE) for model in models]
        steps.clear()
        output = generate(on_device, source, OPTIONS[name])
        assert tokens_of(output) == expected and output.statistics.drafted_tokens > 0
        check_counts(steps, source, name, dispatched=310)


@pytest.mark.parametrize(
    ("width", "name"), [(1, "sampled"), (WIDTH, "greedy"), *exhaustive((1, "greedy"), (WIDTH, "sampled"))]
)
def test_translated_drafts_are_waited_for_no_more_than_others(on_cpu, on_device, expected, steps, width, name):
    """Which tokens both have, the device knows; the text is translated on the host, without a look at the device."""
    own, other = tiny_tokenizer(), character_tokenizer("zyxwvutsrqponmlkjihgfedcba")
    draft = with_tokens_of(on_cpu[0], own, other, len(other)).to(DEVICE)
    num_nodes, source = (CHAIN, "chain") if width == 1 else (TREE, "tree")
    config = SmartSpecConfig(draft, num_nodes=num_nodes, width=width, tokenizer=own, assistant_tokenizer=other)
    inputs = {key: values.to(DEVICE) for key, values in prompts(LENGTHS).items()}
    with hf_smartspec.enabled(on_device[0]) as target:
        for _ in range(2):  # what both have is sent once
            steps.clear()
            output = target.generate(**inputs, max_new_tokens=NUM_TOKENS, assistant=config, **OPTIONS[name])
            assert output.cpu().tolist() == tokens_of(expected[name])
        assert target.smartspec_statistics.last.accepted_tokens > 0
    check_counts(steps, source, name)


def test_devices_agree_on_rejection(on_cpu, on_device, steps):
    """What comes out depends on the drafts, but not on where they are verified."""
    options = OPTIONS["sampled"]
    reference = generate(on_cpu, "rejection", options)
    steps.clear()
    output = generate(on_device, "rejection", options)
    assert tokens_of(output) == tokens_of(reference)
    assert 0 < output.statistics.accepted_tokens < output.statistics.drafted_tokens
    assert output.statistics.accepted_tokens == reference.statistics.accepted_tokens
    check_counts(steps, "rejection", "sampled")


@pytest.mark.parametrize("source", ["lookup", "tree", *exhaustive(["chain"], ["rejection"])])
@pytest.mark.parametrize("name", ["sampled", *exhaustive(["greedy"])])
def test_rows_do_not_add_to_what_is_dispatched(on_device, steps, source, name):
    numbers = []
    for num_rows in (1, 16):
        steps.clear()
        generate(on_device, source, OPTIONS[name], lengths=(7,) * num_rows)
        numbers.append(max(counts["dispatched"] for counts in steps))
        check_counts(steps, source, name)
    assert numbers[1] <= 1.3 * numbers[0], "ragged drafts are padded and cut: that is all there is to more rows"


@pytest.mark.parametrize("source", ["lookup", "tree", *exhaustive(["chain"])])
def test_memory_and_buffers_stay_where_they_are(on_device, expected, accelerator, monkeypatch, source):
    """Over all steps of several calls: keys and values, and where layouts arrive, of the target and of the draft."""
    places: dict[int, list[tuple]] = {}
    run = PackedForward.run

    def noting(forward, planned):
        sent = {name: getattr(planned.layout, name) for name in ("positions", "lines")}
        logits = run(forward, planned)
        memories = [memory for layer in forward.cache.layers for memory in layer.memories]
        buffers = {tensor.on_host.untyped_storage().data_ptr() for tensor in sent.values()}
        place = tuple(memory.on_host.data_ptr() for memory in memories), tuple(buffers)
        places.setdefault(id(forward.model), []).append(place)
        return logits

    generate(on_device, source, OPTIONS["greedy"])  # whatever there is to try out has been
    monkeypatch.setattr(PackedForward, "run", noting)
    for _ in range(2):
        output = generate(on_device, source, OPTIONS["greedy"])
        assert tokens_of(output) == tokens_of(expected["greedy"]) and output.statistics.accepted_tokens > 0
    assert len(places) == (1 if source == "lookup" else 2)
    for found in places.values():
        assert len(found) > 8 and len(set(found)) == 1
        memories, buffers = found[0]
        assert len(memories) == 4 and len(buffers) == 1, "of two layers; all of a step's layout arrives together"


def test_rows_that_move_draft_the_same(on_cpu, on_device, accelerator):
    """Contexts outgrow what drafts have room for, each at its own time."""
    outputs = [generate(models, "chain", {}, lengths=(300, 5, 252, 90)) for models in (on_cpu, on_device)]
    assert tokens_of(outputs[0]) == tokens_of(outputs[1])
    assert outputs[0].statistics.accepted_tokens == outputs[1].statistics.accepted_tokens > 0


@pytest.mark.parametrize("source", ["chain", "rejection", *exhaustive(["none"])])
def test_devices_without_double_precision_sample_the_same(on_cpu, on_device, accelerator, monkeypatch, source):
    expected = generate(on_cpu, source, OPTIONS["warped"])
    monkeypatch.setattr(device, "_WITHOUT_FLOAT64", {DEVICE})
    monkeypatch.setattr(noise, "_uniform_torch", None)  # where double precision is made on the device
    sent, to_device = [], verify.to_device
    monkeypatch.setattr(verify, "to_device", lambda array, place: sent.append(array.dtype) or to_device(array, place))
    output = generate(on_device, source, OPTIONS["warped"])
    assert tokens_of(output) == tokens_of(expected)
    assert "float64" not in map(str, sent) and ("float32" in map(str, sent)) == (source == "rejection")


@pytest.mark.parametrize("source", ["tree", *exhaustive(["rejection"])])
def test_picking_token_by_token_comes_to_the_same(on_cpu, on_device, accelerator, monkeypatch, source):
    """As does picking row by row, where all scores would be too many; a CPU, which nobody waits for, goes without."""
    outputs = [generate(models, source, OPTIONS["warped"]) for models in (on_cpu, on_device)]
    monkeypatch.setattr(verify, "_MOST_AHEAD", 1)
    outputs.append(generate(on_device, source, OPTIONS["warped"]))
    monkeypatch.setattr(verify, "picks_ahead", lambda rows: False)
    outputs.append(generate(on_device, source, OPTIONS["warped"]))
    monkeypatch.setattr(verify, "picks_ahead", lambda rows: rows[0].call.may_pick_ahead)
    outputs.append(generate(on_cpu, source, OPTIONS["warped"]))
    assert all(tokens_of(output) == tokens_of(outputs[0]) for output in outputs)
    assert len({output.statistics.accepted_tokens for output in outputs}) == 1
    assert outputs[0].statistics.accepted_tokens > 0


def test_scores_without_probabilities_have_no_sample_there_either(accelerator):
    scores = torch.randn(4, 40)
    scores[1], scores[2, 3], scores[3] = torch.nan, torch.inf, torch.nan
    seeds, positions = [1, 2, 3, None], [0, 1, 2, 3]
    expected = noise.noisy_argmax(scores, seeds, positions)
    assert expected[1:] == [noise.NO_TOKEN, noise.NO_TOKEN, 0]
    with accelerator.counting() as counts:
        assert noise.noisy_argmax(scores.to(DEVICE), seeds, positions) == expected
    assert counts["waits"] <= 2, "for the copy of these scores, and for the picks"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trials_compare_layers_by_the_layout_of_their_own_forward(dtype, accelerator):
    """Later forwards are laid out in the same memory of the device."""
    model = new_model("llama", dtype=dtype).to(DEVICE)
    with torch.no_grad():
        check(model, WrittenDecoder(make_plan(model)[0]))
