"""The draft model's drafts against plain forwards of the same model, whatever has been accepted before."""

from itertools import product

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

import hf_smartspec
from hf_smartspec import DraftModelCandidates
from hf_smartspec.candidates.request import SourceRequest
from hf_smartspec.drafts.price import LevelPrice
from hf_smartspec.sampling.noise import add_gumbel_noise, draft_seed
from hf_smartspec.target_model.forward.packed import PackedForward

from ...cases import left_padded
from ...covering import exhaustive, part_of
from ...models import VOCAB_SIZE, new_model, noisy_model, shared_model
from ...strategies import path_to
from .checks import PROMPTS, check_tree, count_forwards, look_at_the_end, next_scores, sharp_model, start

# Models that cannot be packed draft row by row, and chains only.
ROW_BY_ROW = ["bloom", "falcon", "gpt_neo", "llama4_text"]


KINDS = [*product(["llama", "mistral", "gemma2", "gpt2"], [1, 2, 4]), *product(ROW_BY_ROW, [1])]
FEW = [*product(["llama"], [1, 2, 4]), ("mistral", 1), ("gemma2", 2), ("gpt2", 4), ("falcon", 1)]


@pytest.mark.parametrize(("architecture", "width"), part_of(KINDS, *FEW))
def test_drafts_follow_the_text_whatever_was_accepted(architecture, width):
    """Requests are asked in changing company and accept paths of any length, also of nodes that were not proposed."""
    check_that_drafts_follow(shared_model(architecture), width)


@pytest.mark.parametrize(
    ("architecture", "width"), [("llama", 1), ("gemma2", 2), *exhaustive(("mistral", 3), ("gpt2", 4))]
)
def test_drafts_that_are_looked_at_in_the_end_follow_the_text(architecture, width, monkeypatch):
    """Nodes see those that they descend from, though the layout has not known which these are."""
    look_at_the_end(monkeypatch)
    check_that_drafts_follow(shared_model(architecture), width)


def check_that_drafts_follow(model, width):
    rng = np.random.default_rng(width)
    source = DraftModelCandidates(model, width=width)
    texts = start(source)
    for step in range(15):
        names = [name for name in rng.permutation(list(texts)) if rng.random() < 0.7]
        limits = [int(rng.integers(1, 9)) for _ in names]
        for name, tree, limit in zip(names, source.propose(names, limits), limits):
            check_tree(model, tree, texts[name], width, limit)
            path = path_to(tree, int(rng.integers(-1, len(tree))))
            tokens = tree.tokens[path].tolist()
            if rng.random() < 0.5:  # the target's own pick is what the draft would have guessed next ...
                tokens.append(int(next_scores(model, texts[name] + tokens).argmax()))
            else:  # ... or something else
                tokens.append(int(rng.integers(VOCAB_SIZE)))
            source.observe(name, np.array(tokens))
            texts[name] += tokens
        if step == 8:
            source.stop("b")  # whose place in the cache another takes
            del texts["b"]
        if step == 10:
            source.start("d", np.array([40, 41]))
            texts["d"] = [40, 41]


OPTIONS = {
    "chain": ({}, None),
    "confident chain": ({"confidence_threshold": 0.1}, None),
    "tree": ({"width": 3}, None),
    "coupled chain": ({}, 7),
    "coupled tree": ({"width": 4}, 7),
    "sampled": ({"samples": True}, 7),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_looking_in_the_end_finds_the_same_trees(name, monkeypatch):
    """With fewer levels for some rows, texts of unequal lengths, and whatever is accepted."""
    options, seed = OPTIONS[name]
    model, processors = sharp_model(), [hf.TemperatureLogitsWarper(0.9)]
    sources = [DraftModelCandidates(model, **options) for _ in range(2)]
    for source in sources:
        start(source, seed, processors)
    num_forwards = count_forwards(monkeypatch)
    for limits in ([9, 2, 5], [3, 12, 12], [1, 1, 7]):
        expected = sources[0].propose(list(PROMPTS), limits)
        with monkeypatch.context() as patch:
            look_at_the_end(patch)
            found = sources[1].propose(list(PROMPTS), limits)
        for request, tree, other in zip(PROMPTS, expected, found):
            assert_same(tree, other)
            tokens = np.append(tree.tokens[path_to(tree, len(tree) - 1)][:2], 5)
            for source in sources:
                source.observe(request, tokens)
    assert max(num_forwards) > 3


def assert_same(tree, other) -> None:
    assert len(tree) and tree.tokens.tolist() == other.tokens.tolist()
    assert tree.parents.tolist() == other.parents.tolist()
    np.testing.assert_allclose(tree.probs, other.probs, rtol=1e-4)
    if tree.distributions is not None:
        torch.testing.assert_close(tree.distributions, other.distributions, rtol=1e-4, atol=1e-6)


def test_a_chain_is_the_drafts_own_greedy_text(way):
    model = shared_model("llama")
    source = DraftModelCandidates(model)
    texts = start(source)
    trees = source.propose(list(texts), [6, 3, 1])
    for tree, text, length in zip(trees, texts.values(), (6, 3, 1)):
        expected = model.generate(input_ids=torch.tensor([text]), max_new_tokens=length)[0, len(text) :]
        assert tree.is_chain and tree.tokens.tolist() == expected.tolist()


def test_tokens_that_were_not_drafted_are_taken_in():
    """The engine need not ask at every step."""
    model = shared_model("llama")
    source = DraftModelCandidates(model)
    texts = start(source)
    for tokens in ([1, 2, 3], [4], [5, 6]):
        source.observe("a", np.array(tokens))
        texts["a"] += tokens
    check_tree(model, source.propose(["a"], [4])[0], texts["a"], 1, 4)


@pytest.mark.parametrize(("architecture", "width"), [("llama", 1), ("llama", 3), ("bloom", 1)])
@pytest.mark.parametrize("between", ["proposals", "a proposal and its verification"])
def test_weights_that_change_between_two_steps(between, architecture, width):
    """A draft of other weights than the text was run with is as if it had always had them, once it is told."""
    model = new_model(architecture)
    source = DraftModelCandidates(model, width=width)
    texts = start(source)
    for step in range(4):
        names = list(texts)[: 3 - step % 2]
        trees = source.propose(names, [6] * len(names))
        for name, tree in zip(names, trees):
            check_tree(model, tree, texts[name], width, 6)
        changes = step in (1, 2)
        if changes and between != "proposals":
            change(model, source)
        for name, tree in zip(names, trees):
            source.observe(name, tree.tokens[:1])
            texts[name] += tree.tokens[:1].tolist()
        if changes and between == "proposals":
            change(model, source)


def change(model, source):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "v_proj" in name or "query_key_value" in name:
                parameter.mul_(-1)
    source.weights_version += 1


@pytest.mark.parametrize("width", [1, 3])
def test_more_nodes_are_more_probable_nodes(width, way):
    """A tree of n nodes holds the n most probable of the candidates: none was left out for a less probable one."""
    source = DraftModelCandidates(shared_model("llama"), width=width)
    start(source)
    for limit in (2, 5, 12):
        tree = source.propose(["c"], [limit])[0]
        assert len(tree) == limit
        if width == 3:
            assert not tree.is_chain
            leaves = set(range(limit)) - set(tree.parents.tolist())
            assert tree.path_probs.min() == min(tree.path_probs[leaf] for leaf in leaves)
        source.observe("c", tree.tokens[:1])


def test_a_chain_ends_behind_a_token_of_low_confidence(way):
    model = shared_model("llama")
    whole = DraftModelCandidates(model)
    start(whole)
    probs = whole.propose(["a"], [8])[0].probs
    threshold = float(np.sort(probs)[3])  # three of eight lie below
    source = DraftModelCandidates(model, confidence_threshold=threshold)
    start(source)
    first_low = int(np.flatnonzero(probs < threshold)[0])
    assert len(source.propose(["a"], [8])[0]) == first_low + 1


def test_a_coupled_draft_picks_with_the_targets_noise_and_processors():
    """Token for token what the draft itself would generate with that noise, from the right position on."""
    model, processors = shared_model("llama"), [hf.TemperatureLogitsWarper(0.7), hf.TopKLogitsWarper(10)]
    source = DraftModelCandidates(model)
    texts = start(source, seed=77, processors=[*processors, hf.RepetitionPenaltyLogitsProcessor(1.2)])
    num_generated = 0
    for accepted in (2, 0, 5, 1):
        tree = source.propose(["a"], [5])[0]
        text, expected = list(texts["a"]), []
        for position in range(num_generated, num_generated + 5):
            scores = LogitsProcessorList(processors)(None, next_scores(model, text)[None])
            expected.append(int(add_gumbel_noise(scores, [77], [position]).argmax()))
            text.append(expected[-1])
        assert tree.tokens.tolist() == expected
        tokens = [*expected[:accepted], 50]
        source.observe("a", np.array(tokens))
        texts["a"] += tokens
        num_generated += len(tokens)


def test_greedy_requests_beside_sampling_ones_stay_greedy(way):
    model = shared_model("llama")
    source = DraftModelCandidates(model)
    for name, seed in (("a", None), ("c", 5)):
        source.begin(
            SourceRequest(
                name,
                np.array(PROMPTS[name]),
                processors=LogitsProcessorList([hf.TemperatureLogitsWarper(2.0)]),
                seed=seed,
            )
        )
    check_tree(model, source.propose(["c", "a"], [4, 4])[1], PROMPTS["a"], 1, 4)


def test_sampled_drafts_come_with_the_distributions_they_were_drawn_from():
    model, warper = shared_model("llama"), hf.TopKLogitsWarper(7)
    source = DraftModelCandidates(model, samples=True)
    start(source, seed=21, processors=[warper])
    tree = source.propose(["c"], [4])[0]
    assert tree.distributions.shape == (4, VOCAB_SIZE)
    text = list(PROMPTS["c"])
    for node in range(4):
        scores = warper(None, next_scores(model, text)[None])
        torch.testing.assert_close(tree.distributions[node], scores.softmax(-1)[0], rtol=1e-4, atol=1e-6)
        # Drawn with noise of its own, which the target's picks do not see.
        assert int(tree.tokens[node]) == int(add_gumbel_noise(scores, [draft_seed(21)], [node]).argmax())
        text.append(int(tree.tokens[node]))


def test_nothing_is_kept_when_the_last_request_has_ended():
    source = DraftModelCandidates(shared_model("llama"))
    start(source)
    source.propose(list(PROMPTS), [3, 3, 3])
    for name in (*PROMPTS, "never started"):
        source.stop(name)
    assert source._forward is None and not source._states


def test_new_weights_are_used_by_the_next_call():
    model = new_model("llama")
    source = DraftModelCandidates(model)
    for factor in (1.0, -1.0):
        for parameter in model.parameters():
            parameter.mul_(factor)
        source.start("a", np.array(PROMPTS["a"]))
        check_tree(model, source.propose(["a"], [4])[0], PROMPTS["a"], 1, 4)
        source.stop("a")


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_draft_that_broke_halfway_can_be_begun_anew(width, level, way, monkeypatch):
    """After an error the engine asks row by row; what the failed attempt left in the cache must not matter."""
    model = shared_model("llama")
    source = DraftModelCandidates(model, width=width)
    texts = start(source)
    source.propose(list(texts), [2, 2, 2])
    for name in texts:
        source.observe(name, np.array([7]))
        texts[name].append(7)
    run, calls = PackedForward.run, []

    def breaking(*args):
        logits = run(*args)
        calls.append(args)
        if len(calls) > level:
            raise RuntimeError("broken")
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(PackedForward, "run", breaking)
        with pytest.raises(RuntimeError):
            source.propose(list(texts), [8, 8, 8])
    for name, text in texts.items():
        check_tree(model, source.propose([name], [8])[0], text, width, 8)


@pytest.mark.parametrize("width", [1, 3])
def test_a_draft_ends_where_the_models_positions_end(width, way):
    """Learned positions end somewhere; a text that has grown beyond them gets no drafts."""
    model = new_model("gpt2", n_positions=12)
    source = DraftModelCandidates(model, width=width)
    source.start("a", np.arange(3, 12))
    text = list(range(3, 12))
    for length in range(9, 16):
        assert len(text) == length
        tree = source.propose(["a"], [8])[0]
        deepest = max(tree.depths, default=0)
        assert deepest <= max(0, 12 - length + 1)
        assert (len(tree) > 0) == (length <= 12)
        source.observe("a", np.array([length]))
        text.append(length)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"model": "a name"}, TypeError, "PreTrainedModel"),
        ({"num_nodes": 0}, ValueError, "num_nodes"),
        ({"width": 0}, ValueError, "width"),
        ({"width": 1.5}, ValueError, "1.5"),
        ({"confidence_threshold": 1.1}, ValueError, "confidence_threshold"),
        ({"samples": True, "width": 2}, ValueError, "width=1"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, match):
    with pytest.raises(error, match=match):
        DraftModelCandidates(**{"model": shared_model("llama")} | arguments)


@pytest.mark.parametrize("architecture", part_of(ROW_BY_ROW, "bloom", "falcon", "llama4_text"))
@pytest.mark.parametrize("samples", [False, True])
def test_models_that_cannot_be_packed_draft_for_batches(architecture, samples):
    target, prompts = shared_model(architecture), [[5, 9, 5, 9, 5], [11], [3, 4, 5, 6, 7, 8, 9, 10]]
    kwargs = left_padded(prompts) | {"max_new_tokens": 24}
    if samples:
        kwargs |= {"do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 1.0, "seed": 3}
    with hf_smartspec.enabled(target):
        expected = target.generate(**kwargs, assistant="none")
        output = target.generate(**kwargs, assistant=noisy_model(architecture), return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    assert output.statistics.accepted_tokens > 0.3 * output.statistics.drafted_tokens > 0


def test_models_that_cannot_be_packed_draft_no_trees():
    with pytest.raises(ValueError, match="BloomForCausalLM cannot be packed, so that it drafts chains: leave `width`"):
        DraftModelCandidates(shared_model("bloom"), width=2)
    priced = DraftModelCandidates(shared_model("bloom"))
    texts = start(priced)
    trees = priced.propose(list(texts), [6] * len(texts), LevelPrice(call=0.0, row=0.0, node=0.0, trust=1.0))
    assert all(tree.is_chain and len(tree) == 6 for tree in trees)


def test_models_that_keep_a_state_cannot_draft():
    target = shared_model("llama")
    with hf_smartspec.enabled(target), pytest.raises(ValueError, match=r"RwkvForCausalLM cannot draft: .*Use a draft"):
        target.generate(**left_padded([[3, 4]]), max_new_tokens=4, assistant=shared_model("rwkv"))


def test_rows_whose_memory_moves_get_their_own_drafts(way):
    """Rows outgrow their slots, in which order ever: what is found behind one is not taken for another's."""
    model = shared_model("llama")
    source = DraftModelCandidates(model, num_nodes=6, width=2)
    generator = np.random.default_rng(0)
    texts = {name: generator.integers(3, VOCAB_SIZE, length).tolist() for name, length in
             {"a": 300, "b": 5, "c": 250, "d": 100}.items()}  # fmt: skip
    for name, text in texts.items():
        source.start(name, np.array(text))
    slabs = set()
    for _ in range(3):
        for (_, text), tree in zip(texts.items(), source.propose(list(texts), [6] * 4)):
            check_tree(model, tree, text, 2, 6)
        assert source._forward is not None
        slabs.add(len(source._forward.cache.slabs.items))
        for name, text in texts.items():
            text += generator.integers(3, VOCAB_SIZE, 4).tolist()
            source.observe(name, np.array(text[-4:]))
    assert max(slabs) > 1
