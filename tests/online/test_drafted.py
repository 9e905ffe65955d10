"""What drafts said, and was rejected: kept with the scores of a plain forward, and learnt as if it stood alone."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationMixin

from hf_smartspec import Engine, OnlineDistillation, SmartSpecConfig, enable
from hf_smartspec.candidates.committed import Committed
from hf_smartspec.decoding.learning import Shown
from hf_smartspec.drafts.tree import DraftTree
from hf_smartspec.online.branches import reads_branches
from hf_smartspec.online.drafted import rejected
from hf_smartspec.online.learner import Learner
from hf_smartspec.online.options import LearningOptions
from hf_smartspec.online.recorder import SampleRecorder
from hf_smartspec.online.samples import Batch

from ..covering import exhaustive
from ..models import new_model
from .helpers import EAGER, are_equal, generate, new_drafter, new_target, sample_of, student_with, weights_of

PROMPTS = [[5, 6, 7, 8, 9], [12, 13, 14]]


@pytest.fixture(scope="module")
def target():
    return enable(new_target())


def online_that_keeps(**options) -> OnlineDistillation:
    options = {"every_requests": 10**6, "top_k": 8, "shadow": 0, "sampling": "student", **options}
    return OnlineDistillation(background=False, **options)


def kept(online):
    return [sample for learner in online._learners.values() for sample in learner._buffer.new]


def text_of(sample, node: int) -> list[int]:
    """The text that ends with a rejected token."""
    own, branch = sample.drafted, []
    while node >= 0:
        branch.insert(0, int(own.tokens[node]))
        root, node = own.roots[node], own.parents[node]
    return [*sample.prompt.tolist(), *sample.response[:root].tolist(), *branch]


def check(target, sample) -> None:
    for node in range(len(sample.drafted)):
        wanted = sample_of(target, text_of(sample, node), [0])
        found = torch.zeros(100).scatter(0, sample.drafted.top_ids[node].long(), sample.drafted.top_probs[node].float())
        expected = torch.zeros(100).scatter(0, wanted.top_ids[0].long(), wanted.top_probs[0].float())
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("assistant", ["draft", "beside suffix trees"])
def test_what_is_kept_of_rejected_tokens_is_what_a_plain_forward_says(target, assistant, do_sample):
    online, draft = online_that_keeps(), new_drafter("draft", target)
    config = SmartSpecConfig(draft if assistant == "draft" else ["suffix", draft], num_nodes=4, online=online)
    ids = torch.tensor([[0, 0, *PROMPTS[1]], PROMPTS[0]])
    arguments = {"attention_mask": (ids > 0).long(), "max_new_tokens": 10, "do_sample": do_sample, "eos_token_id": -1}
    target.generate(ids, assistant=config, **arguments, **({"seed": 3} if do_sample else {}))
    samples = kept(online)
    assert len(samples) == 2 and sum(len(item.drafted) for item in samples) > 20
    for sample in samples:
        check(target, sample)
        assert len(sample.drafted.is_asked) == len(sample.response) and sample.drafted.is_asked.any()
        assert (sample.drafted.roots < len(sample.response)).all()


def test_engines_whose_texts_are_longer_than_samples(target):
    online = online_that_keeps(max_length=9)
    with Engine(target, SmartSpecConfig(new_drafter("draft", target), num_nodes=3), online=online) as engine:
        engine.get_result(engine.add_request(PROMPTS[0], max_new_tokens=16))
    (sample,) = kept(online)
    assert sample.num_tokens == 9 and 0 < len(sample.drafted) <= 9 + 3
    long = sample_of(target, PROMPTS[0], sample.response.tolist())
    assert [*sample.prompt, *sample.response] == [*long.prompt, *long.response][-9:]
    short = sample.end(7)
    assert (short.drafted.roots < len(short.response)).all() and len(short.drafted.is_asked) == len(short.response)
    assert short.num_bytes < sample.num_bytes


def tree_of(parents: list[int]) -> DraftTree:
    return DraftTree(np.arange(len(parents)) + 50, np.array(parents, np.int64), np.ones(len(parents), np.float32))


@given(st.lists(st.integers(0, 5), max_size=7), st.integers(0, 7))
def test_rejected_tokens_hang_where_the_accepted_path_left_off(steps, num):
    parents = [max(index - step - 1, -1) for index, step in enumerate(steps)]
    tree, path = tree_of(parents), []
    while len(path) < num and (children := np.flatnonzero(tree.parents == (path[-1] if path else -1))).size:
        path.append(int(children[-1]))
    text = [1, 2, 3]
    found = rejected(tree, np.array(path, np.int64), len(text))
    assert sorted([*found.nodes, *path]) == list(range(len(tree)))
    committed = [*text, *tree.tokens[path]]

    def whole(node):
        return [*(whole(tree.parents[node]) if tree.parents[node] >= 0 else text), int(tree.tokens[node])]

    def kept_text(number):
        parent = found.parents[number]
        before = kept_text(parent) if parent >= 0 else committed[: found.roots[number]]
        return [*before, int(tree.tokens[found.nodes[number]])]

    for number, node in enumerate(found.nodes):
        assert kept_text(number) == whole(node)


def test_of_wide_trees_the_likeliest_are_kept():
    probs = np.array([0.9, 0.8, *np.linspace(0.1, 0.7, 12)], np.float32)
    tree = DraftTree(np.arange(14), np.array([-1, 0, *[-1] * 12]), probs)
    nodes = rejected(tree, np.array([], np.int64), 0).nodes.tolist()
    assert nodes == [0, 1, *range(8, 14)]


def test_behind_a_draft_that_is_all_accepted_nothing_was_drafted():
    samples = []
    recorder = SampleRecorder(samples.append, 2, keeps_drafts=True)
    recorder.start("a", np.array([1, 2]), True)
    tree, nothing = tree_of([-1, 0]), DraftTree.empty()
    for tokens, path, drafted in (
        ([50, 51, 7], [0, 1], tree),
        ([50, 8], [0], tree),
        ([9], [], tree),
        ([9], [], nothing),
    ):
        step = Committed(np.array(tokens), np.array(path, np.int64), tree=drafted)
        recorder.show({"a": Shown(step, 0)}, torch.zeros(3, 100))
    recorder.stop("a")
    assert samples[0].drafted.is_asked.tolist() == [True, True, False, True, True, True, False]
    assert samples[0].errors.tolist() == [False, False, False, False, True, True, False]


@pytest.mark.parametrize("sampling", ["student", "mixed"])
def test_a_drafter_reads_its_branches_as_if_each_stood_alone(target, sampling):
    online, draft = online_that_keeps(), new_drafter("draft", target)
    config = SmartSpecConfig(draft, num_nodes=4, online=online)
    target.generate(torch.tensor([PROMPTS[0]] * 2), assistant=config, max_new_tokens=8)
    target.generate(torch.tensor([PROMPTS[1]]), assistant=config, max_new_tokens=5)
    samples = kept(online)
    samples[0].drafted.is_asked[2] = False
    batch = Batch.with_drafts(samples, torch.device("cpu"), sampling == "student")
    (found,) = student_with(draft).predictions(batch)
    logits, chosen = iter(found.logits), iter(batch.chosen[found.where].tolist())
    for sample in samples:
        text = [*sample.prompt.tolist(), *sample.response.tolist()]
        plain = draft(torch.tensor([text])).logits[0]
        for place in range(len(sample.prompt), len(text)):
            if sampling == "mixed" or sample.drafted.is_asked[place - len(sample.prompt)]:
                torch.testing.assert_close(next(logits), plain[place - 1], rtol=0, atol=1e-5)
                assert next(chosen) == text[place]
        for node in range(len(sample.drafted)):
            alone = draft(torch.tensor([text_of(sample, node)])).logits[0, -1]
            torch.testing.assert_close(next(logits), alone, rtol=0, atol=1e-5)
            assert next(chosen) == sample.drafted.top_ids[node, 0]
    assert next(logits, None) is None and torch.isfinite(found.logits).all()


@pytest.mark.parametrize("loss", ["kl", *exhaustive(["labels"])])
def test_what_is_learnt_behind_rejected_tokens_brings_the_drafter_nearer_there(target, loss):
    online, draft = online_that_keeps(), new_drafter("draft", target)
    for seed in range(3):
        ids = torch.randint(3, 90, (4, 5), generator=torch.Generator().manual_seed(seed))
        target.generate(ids, assistant=SmartSpecConfig(draft, num_nodes=4, online=online), max_new_tokens=10)
    options = {
        "shadow": 0,
        "sampling": "student",
        "loss": loss,
        "passes": 8,
        "learning_rate": 3e-3,
        "batch_tokens": 128,
    }
    learner = Learner(student_with(draft), LearningOptions(**options))
    samples = kept(online)

    def rate():
        batch = Batch.with_drafts(samples, torch.device("cpu"), True)
        (item,) = learner.student.predictions(batch)
        is_drafted = batch.layout.is_drafted[item.where]
        return float((item.logits.argmax(-1) == batch.chosen[item.where])[is_drafted].float().mean())

    before = rate()
    for sample in samples:
        learner._keep(sample)
    learner.update()
    assert rate() > before + 0.1


@pytest.mark.parametrize("sampling", ["student", "mixed"])
def test_outputs_stay_and_weights_change(target, sampling):
    online, draft = OnlineDistillation(background=False, **EAGER, sampling=sampling), new_drafter("draft", target)
    before = weights_of(draft)
    for _ in range(2):
        generate(target, online, draft)
    assert not are_equal(before, weights_of(draft))
    assert [item.updates for item in online.statistics.values()] == [2]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt2", "opt", "phi3", "bloom", "mamba"])
def test_which_models_read_branches(architecture, attention):
    model = new_model(architecture)
    if architecture not in ("bloom", "mamba"):
        model.set_attn_implementation(attention)
    assert reads_branches(model, 8) is (architecture not in ("bloom", "mamba"))


def test_attention_that_reaches_less_far_than_samples_is_refused():
    assert reads_branches(new_model("mistral"), 4) and not reads_branches(new_model("mistral"), 1000)


def test_drafters_that_cannot_learn_from_texts_of_their_own_are_refused(target):
    online = OnlineDistillation(sampling="mixed")
    for drafter in (new_drafter("medusa", target), new_model("bloom")):
        with pytest.raises(ValueError, match="use `sampling='teacher'`"):
            generate(target, online, drafter)
    with pytest.raises(ValueError, match="`positions='errors'`"):
        OnlineDistillation(sampling="student", positions="errors")
    with pytest.raises(ValueError, match="`sampling` must be one of"):
        OnlineDistillation(sampling="self")
    ids = torch.tensor([[5, 6, 7, 8]])
    assistant = SmartSpecConfig(new_drafter("medusa", target), online=OnlineDistillation(background=False))
    plain = GenerationMixin.generate(target, ids, max_new_tokens=5)
    assert torch.equal(target.generate(ids, assistant=assistant, max_new_tokens=5), plain)
