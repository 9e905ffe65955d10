"""Recordings serve where shapes, weights and memory are what they were, and give what the decoder gives."""

import numpy as np
import pytest
import torch

import hf_smartspec
from hf_smartspec import DraftModelCandidates, DraftTree, SmartSpecConfig
from hf_smartspec.target_model.attention import varlen
from hf_smartspec.target_model.forward.packed import PackedForward
from hf_smartspec.target_model.graphs import recorder, recording_cache
from hf_smartspec.target_model.layout.rows import RowInput
from hf_smartspec.target_model.written import packed_forward

from ...candidates.models import checks
from ...generate.helpers import noisy_copy, prompts, tiny_llama
from ...models import GEMMA_4, new_model, shared_model
from ...recorder import OperationRecorder
from ..attention.test_varlen import calls  # noqa: F401

# Compiled experts run on CPUs alone, where nothing is recorded; what they do depends on the tokens.
RECORDED = ["llama", "gemma3_text", *(name for name in GEMMA_4 if "experts" not in name)]
OPTIONS = prompts([5, 9]) | {"max_new_tokens": 48, "do_sample": False, "eos_token_id": None}


class Steps:
    """A text, decoded step by step, with drafts of one length."""

    def __init__(self, model):
        self.model, self.forward = model, packed_forward(model)
        self.row, self.text = self.forward.add(100), [3, 4, 5]

    def run(self, token=7, num_drafted=2):
        """The logits behind the text, which must be those of the model."""
        self.text.append(token)
        feed = np.array(self.text[self.row.length :])
        logits, _ = self.forward.forward([RowInput(self.row, feed, DraftTree.chain(np.arange(num_drafted)))])
        self.forward.commit([self.row], [[]])
        expected = self.model(input_ids=torch.tensor([self.text])).logits[0, -1]
        torch.testing.assert_close(logits[0], expected, atol=1e-5 * float(expected.std()), rtol=1e-4)
        return logits


@pytest.mark.parametrize("source", ["none", "prompt_lookup", "suffix", "chain", "tree"])
@pytest.mark.parametrize("architecture", RECORDED)
def test_tokens_are_those_of_plain_decoding(recorders, architecture, source):
    model = new_model(architecture)
    draft = noisy_copy(model, 0.03)
    trees = {"chain": SmartSpecConfig(draft), "tree": SmartSpecConfig(DraftModelCandidates(draft, width=3))}
    expected = model.generate(**OPTIONS)
    with hf_smartspec.enabled(model):
        for _ in range(2):
            assert model.generate(**OPTIONS, assistant=trees.get(source, source)).tolist() == expected.tolist()
    assert sum(item.num_replays for item in recorders) > 0


def test_the_third_step_of_a_shape_is_compared_and_the_fourth_replayed(recorders):
    steps = Steps(shared_model("llama"))
    steps.run()  # of the whole prompt
    own = recorders[-1]
    counts = []
    for _ in range(5):
        steps.run()
        counts.append((own.num_recorded, own.num_replays))
    assert counts == [(0, 0), (1, 0), (1, 1), (1, 2), (1, 3)]
    steps.run(num_drafted=9)
    assert own.num_replays == 3, "of another shape"
    kept = steps.run()
    before = kept.clone()
    steps.run(token=9)
    assert torch.equal(kept, before) and own.num_replays == 5, "logits stay as they are"


def test_other_weights_and_other_memory_are_seen(recorders):
    model = new_model("llama")
    steps = Steps(model)
    for _ in range(5):
        steps.run()
    own = recorders[-1]
    assert (own.num_recorded, own.num_replays) == (1, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    steps.row.length = 0
    steps.run()  # all of it anew
    steps.run()
    assert own.num_replays == 3, "what is written to weights needs no recording"
    model.model.layers[0].mlp.down_proj.weight.data = model.model.layers[0].mlp.down_proj.weight.data.clone() * 2
    steps.row.length = 0
    for count in (3, 3, 3, 4):
        steps.run()
        assert own.num_replays == count
    steps.forward.add(5000)  # for which memory grows
    for count in (4, 4, 5):
        steps.run()
        assert own.num_replays == count
    assert own.num_recorded == 3


@torch.inference_mode()
def double(logits):
    logits.mul_(2)


def fail(logits):
    raise RuntimeError("not to be recorded")


@pytest.mark.parametrize("fault", [double, fail])
def test_what_gives_other_results_or_cannot_be_recorded_is_not_used(recorders, monkeypatch, fault):
    own = OperationRecorder(fault)
    monkeypatch.setattr(recorder, "_RECORDERS", {"cpu": lambda device: own})
    model = new_model("llama")
    steps = Steps(model)
    for number in range(8):
        steps.run(num_drafted=2 + number % 2)
    assert own.num_recorded == 1 + (fault is double) and own.num_replays == (fault is double)
    own.fault = None
    model.lm_head.weight.data = model.lm_head.weight.data.clone()  # another decoder
    for _ in range(6):
        steps.run()
    assert own.num_replays > 1


def test_no_more_are_made_than_there_is_room_for(recorders, monkeypatch):
    monkeypatch.setattr(recording_cache, "_MOST", 2)
    steps = Steps(shared_model("llama"))
    steps.run()
    own = recorders[-1]
    for num_drafted in (1, 2, 3):
        for _ in range(3):
            steps.run(num_drafted=num_drafted)
    assert len(steps.forward.recordings._recordings) == 2 and own.num_recorded == 3
    own.is_full = True
    for _ in range(3):
        steps.run(num_drafted=5)
    assert own.num_recorded == 3


def test_hidden_states_are_handed_out(recorders):
    model = shared_model("llama")
    steps, found = Steps(model), []
    for _ in range(6):
        with steps.forward.taps.taking((-1, 1)) as fed:
            steps.run()
            pieces = fed[steps.row].pieces
            last = pieces[-1].lines[pieces[-1].num_fed - 1]
            found.append({layer: states[last] for layer, states in pieces[-1].states.items()})
    assert recorders[-1].num_replays == 3
    for length, states in enumerate(found, start=4):
        output = model.model(input_ids=torch.tensor([steps.text[:length]]), output_hidden_states=True)
        torch.testing.assert_close(states[1], output.hidden_states[1][0, -1], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(states[-1], output.last_hidden_state[0, -1], rtol=1e-4, atol=1e-5)
    assert found[-1][1].data_ptr() != found[-2][1].data_ptr()


def hook(model):
    return model.model.embed_tokens.register_forward_hook(lambda module, args, output: output * 1.5)


def own_embedding(model):
    class Switched(torch.nn.Embedding):
        factor = 1.5

        def forward(self, ids):
            return super().forward(ids) * self.factor

    model.model.embed_tokens.__class__ = Switched


def moved_embedding(model):
    embedding = model.model.embed_tokens
    embedding.weight.data = embedding.weight.data * 1.5


def other_frequencies(model):
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 0.5


@pytest.mark.parametrize("change", [hook, own_embedding, moved_embedding, other_frequencies])
def test_what_changes_in_modules_that_are_called_is_seen(recorders, change):
    """They are run by themselves, and a recording would know nothing of it."""
    steps = Steps(new_model("llama", tie_word_embeddings=False))
    for _ in range(5):
        steps.run()
    own = recorders[-1]
    assert own.num_replays == 2
    undo = change(steps.model)
    steps.row.length = 0
    for _ in range(3):
        steps.run()
    assert own.num_replays == 2
    for _ in range(3):
        steps.run()
    assert (own.num_replays == 2) == (change in (hook, own_embedding)), "what cannot be recorded is not"
    if undo is not None:
        undo.remove()
        steps.row.length = 0
        for _ in range(5):
            steps.run()
        assert own.num_replays > 2


def test_layouts_are_not_padded_where_nothing_is_recorded(recorders):
    steps = Steps(new_model("llama"))
    for is_hooked in (False, True, False):
        if is_hooked:
            undo = steps.model.model.layers[0].register_forward_hook(lambda module, args, output: output)
        elif steps.text[3:]:
            undo.remove()
        steps.run(num_drafted=4)
        steps.run(num_drafted=4)
        assert steps.forward.cache.layout.is_padded != is_hooked


@pytest.mark.parametrize("is_trusted", [True, False])
def test_steps_without_masks(recorders, calls, monkeypatch, is_trusted):  # noqa: F811
    """Batches of chains of which some have the same rounded sizes, whatever rows they are of."""
    if not is_trusted:
        monkeypatch.setattr(varlen, "_TOLERANCE", -1.0)
    model = shared_model("llama")
    forward, plain = packed_forward(model), PackedForward(model)
    own, texts = recorders[-1], [list(range(3, 3 + length)) for length in (5, 9, 30, 7, 12, 40)]
    rows, others = ([kind.add() for _ in texts] for kind in (forward, plain))
    chosen = [range(6), range(6), range(5), (0, 1), (0, 2), (1, 2), (0, 5), (0, 1, 2, 3, 4), range(6), range(6)]
    for number, places in enumerate(chosen):
        inputs = []
        for own_rows in (rows, others):
            items = [(own_rows[place], texts[place]) for place in places]
            inputs.append(
                [RowInput(row, np.array(text[row.length :]), DraftTree.chain([8, number])) for row, text in items]
            )
        (logits, offsets), (expected, starts) = forward.forward(inputs[0]), plain.forward(inputs[1])
        for first, start in zip(offsets, starts):
            torch.testing.assert_close(logits[first : first + 3], expected[start : start + 3], atol=1e-5, rtol=1e-4)
        for place in places:
            texts[place].append(number + 3)
            for kind, own_rows in ((forward, rows), (plain, others)):
                kind.commit([own_rows[place]], [[]])
    assert own.num_replays > 2 * is_trusted and (calls["compiled"] > 10) == is_trusted


def test_trees_that_grow_at_once_see_their_ancestors_without_masks(recorders, calls, monkeypatch):  # noqa: F811
    """The layout has not known which these are; 72 nodes have bits in two words."""
    model, names = checks.sharp_model(), list(checks.PROMPTS)
    by_level, at_once = (DraftModelCandidates(model, width=4) for _ in range(2))
    for source in (by_level, at_once):
        checks.start(source)
    expected = by_level.propose(names, [72] * len(names))
    checks.look_at_the_end(monkeypatch)
    for _ in range(6):
        found = at_once.propose(names, [72] * len(names))
        for tree, other in zip(found, expected):
            assert tree.tokens.tolist() == other.tokens.tolist() and tree.parents.tolist() == other.parents.tolist()
            np.testing.assert_allclose(tree.probs, other.probs, rtol=1e-4)
    assert all(varlen._is_right.values()) and calls["compiled"] > 50
    assert recorders[-1].num_replays > 1


def test_modules_that_are_called_are_not_recorded(recorders):
    steps = Steps(new_model("llama"))
    mlp = steps.model.model.layers[0].mlp
    mlp.register_forward_hook(lambda module, args, output: output * 0.5)
    for _ in range(5):
        steps.run()
    assert not any(item.num_recorded for item in recorders)


def test_calls_share_what_was_recorded(recorders):
    model = hf_smartspec.enable(tiny_llama())
    numbers = []
    for _ in range(3):
        model.generate(**OPTIONS, assistant="none")
        numbers.append(sum(item.num_recorded for item in recorders))
    assert 0 < numbers[0] == numbers[1] == numbers[2]
    hf_smartspec.disable(model)
