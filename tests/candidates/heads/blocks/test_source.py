"""Block drafters that draft: the tokens of plain decoding, from folders, beside other sources, in engines."""

from functools import partial

import numpy as np
import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MuseGlimmerAssistantConfig,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)
from transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant import MuseGlimmerAssistantModel

import hf_smartspec
from hf_smartspec import Committed, Engine, SmartSpecConfig
from hf_smartspec.candidates.heads.blocks.drafter import BlockDrafter
from hf_smartspec.candidates.heads.blocks.source import BlockCandidates
from hf_smartspec.candidates.heads.kinds import source_of
from hf_smartspec.candidates.request import SourceRequest
from hf_smartspec.drafts.price import LevelPrice
from hf_smartspec.goodput import Calibrator, CostModel, TreeGoodput
from hf_smartspec.sampling.noise import gumbel_noise
from hf_smartspec.sampling.processors import ScoreProcessing
from hf_smartspec.target_model.drafters.blocks import BlockForward

from ....covering import exhaustive, part_of
from ....generate.helpers import prompts, tiny_llama
from ....models import VOCAB_SIZE, new_model, shared_model
from ....serving.helpers import TIMEOUT
from ...combined.test_wrapped_outputs import PROMPTS, _DFlash, by_transformers, plain, spread
from ..test_medusa_source import GREEDY, LENGTHS, NUM_TOKENS, SAMPLED, WAYS
from .forwards import run_block
from .published import random_drafter, z_lab


def write(target, folder, **options) -> str:
    vocab = target.config.vocab_size
    z_lab(random_drafter(target.config.hidden_size, vocab, **options), vocab, folder)
    return str(folder)


@pytest.fixture(scope="module")
def target():
    model = tiny_llama(eos_token_id=None)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def folder(target, tmp_path_factory):
    return write(target, tmp_path_factory.mktemp("blocks"))


ASSISTANTS = {
    "folder": lambda folder, target: folder,
    "heads": lambda folder, target: BlockDrafter.from_pretrained(folder, target),
    "chain": lambda folder, target: SmartSpecConfig(folder, num_nodes=5, width=1),
    "with suffix trees": lambda folder, target: ["suffix", folder],
    "full trees": lambda folder, target: SmartSpecConfig(folder, policy=TreeGoodput(CostModel(0.0, 1e-5, 1e-2))),
}


@pytest.mark.parametrize("name", ASSISTANTS)
@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_plain_decoding(target, folder, name, way):
    inputs = prompts(LENGTHS)
    with hf_smartspec.enabled(target):
        expected = target.generate(**inputs, **WAYS[way], assistant="none")
        output = target.generate(
            **inputs, **WAYS[way], assistant=ASSISTANTS[name](folder, target), return_dict_in_generate=True
        )
    assert torch.equal(output.sequences, expected)
    assert output.statistics.drafted_tokens > NUM_TOKENS, "it was asked until the end"


@pytest.mark.parametrize(
    ("architecture", "options"),
    [("mistral", SAMPLED), ("bloom", GREEDY), *exhaustive(("gemma2", GREEDY), ("gpt2", SAMPLED), ("phi", SAMPLED))],
)
def test_targets_that_are_packed_or_run_row_by_row(architecture, options, tmp_path):
    model = new_model(architecture, eos_token_id=None)
    model.generation_config.eos_token_id = None
    write(model, tmp_path, from_anchor=True)
    with hf_smartspec.enabled(model):
        expected = model.generate(**prompts(LENGTHS), **options, assistant="none")
        output = model.generate(**prompts(LENGTHS), **options, assistant=str(tmp_path), return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    assert output.statistics.drafted_tokens > NUM_TOKENS, "it was asked until the end"


@pytest.mark.parametrize("options", [SAMPLED, *exhaustive([GREEDY])])
def test_tokens_in_half_precision(tmp_path, options):
    model = tiny_llama(eos_token_id=None, head_dim=16).bfloat16()
    write(model, tmp_path, head_dim=16, windows=(6, None), causal=(True, False))
    with hf_smartspec.enabled(model):
        expected = model.generate(**prompts(LENGTHS), **options, assistant="none")
        config = SmartSpecConfig(str(tmp_path), num_nodes=9)
        output = model.generate(**prompts(LENGTHS), **options, assistant=config, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected) and output.statistics.drafted_tokens > NUM_TOKENS


KINDS = {
    "dflash2": {"convolution": (2, 8), "selector_rank": 3},
    "dspark": {"markov": "vanilla", "confidence": "markov", "from_anchor": True},
    "dspark, gated": {"markov": "gated", "own_vocab": 30},
    "dspark, rnn": {"markov": "rnn", "confidence": "hidden", "from_anchor": True},
    "jetspec": {"config": {"causal_head": True}},
    "dflash, MiMo": {"has_sinks": True, "turned": 4, "windows": (6, 6), "causal": False},
}


@pytest.mark.parametrize("way", part_of(WAYS, "sampled"))
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_drafts_trees_of_which_nothing_but_the_right_tokens_stay(target, tmp_path, kind, way):
    folder = write(target, tmp_path, **KINDS[kind])
    assert BlockDrafter.from_pretrained(folder, target).label == kind.partition(",")[0]
    with hf_smartspec.enabled(target):
        expected = target.generate(**prompts(LENGTHS), **WAYS[way], assistant="none")
        config = SmartSpecConfig(folder, num_nodes=9, width=1 if "gated" in kind else None)
        output = target.generate(**prompts(LENGTHS), **WAYS[way], assistant=config, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    assert output.statistics.drafted_tokens > NUM_TOKENS, "it was asked until the end"


# --- What is drafted, and of what ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    target = shared_model("llama")
    folder = write(target, tmp_path_factory.mktemp("heads"), outputs=(-1, 0))
    return BlockDrafter.from_pretrained(folder, target)


def begun(source, name, length, number=0, seed=None) -> torch.Tensor:
    """A request of so many tokens, the last one generated; the hidden states `[length - 1, 2 * hidden]` of its text."""
    states = torch.randn(length - 1, 2, 32, generator=torch.Generator().manual_seed(number))
    text = (np.arange(length) * 7 + number) % 90
    warpers = LogitsProcessorList([TemperatureLogitsWarper(0.7), TopKLogitsWarper(20)])
    source.begin(SourceRequest(name, text[:-1], processors=warpers, seed=seed))
    source.observe(name, Committed(text[-1:], hidden_states={0: states[:, 0], 1: states[:, 1]}))
    return states.flatten(1)


def test_the_context_is_that_of_the_committed_text_whichever_branch_was_accepted(heads):
    """Hidden states come by their place on the accepted path; nothing of a block stays."""
    source, anew = BlockCandidates(heads), BlockCandidates(heads)
    states = begun(source, "a", 9)
    (tree,) = source.propose(["a"], [40])
    leaf = max(range(len(tree)), key=lambda node: (tree.depths[node] == 2) * (node + 1))
    path = [int(tree.parents[leaf]), leaf]
    assert tree.path_probs[leaf] < tree.path_probs[:leaf].max()
    tokens = np.append(tree.tokens[path], 5)
    more = torch.randn(3, 2, 32, generator=torch.Generator().manual_seed(9))  # of the anchor, and the path
    committed = Committed(tokens, np.array(path), {0: more[:, 0], 1: more[:, 1]}, tree=tree, start=8)
    source.observe("a", committed)
    (found,) = source.propose(["a"], [40])
    assert source._states["a"].row.length == 11
    assert source.bytes_per_token() == source._forward.cache.bytes_per_line
    text = np.concatenate([(np.arange(9) * 7) % 90, tokens])
    anew.start("b", text[:-1])
    whole = torch.cat([states, more.flatten(1)])
    anew.observe("b", Committed(text[-1:], hidden_states={0: whole[:, :32], 1: whole[:, 32:]}))
    (expected,) = anew.propose(["b"], [40])
    assert found.tokens.tolist() == expected.tokens.tolist() and found.parents.tolist() == expected.parents.tolist()
    np.testing.assert_allclose(found.probs, expected.probs, rtol=1e-4)
    for layer in range(len(heads.layers)):
        for own, other in zip(source._forward.cache.layers[layer].memories, anew._forward.cache.layers[layer].memories):
            rows = source._states["a"].row, anew._states["b"].row
            torch.testing.assert_close(*[memory[row.line : row.line + 11] for memory, row in zip((own, other), rows)])


@pytest.mark.parametrize("own_vocab", [None, 60])
def test_depths_follow_the_slots_and_rows_are_asked_together(heads, own_vocab, tmp_path):
    """Where the target samples, as "b" does, with its noise and the processors of its scores."""
    if own_vocab is not None:
        target = shared_model("llama")
        heads = BlockDrafter.from_pretrained(write(target, tmp_path, outputs=(-1, 0), own_vocab=own_vocab), target)
    source, texts = BlockCandidates(heads, width=1), {}
    for number, (name, length, seed) in enumerate((("a", 9, None), ("b", 4, 5), ("c", 15, None))):
        texts[name] = begun(source, name, length, number, seed)
    trees = dict(zip("abc", source.propose(["a", "b", "c"], [9, 9, 0])))
    assert len(trees.pop("c")) == 0
    for name, tree in trees.items():
        anchor = torch.tensor([source._states[name].tokens[-1]])
        hidden = run_block(heads, texts[name], heads.embed(anchor, heads.block_size)[0])
        ids = torch.arange(VOCAB_SIZE) if own_vocab is None else heads.token_ids
        scores = heads.logits(hidden[1:])
        if name == "b":
            scores /= 0.7
            scores = scores.masked_fill(scores < scores.topk(20).values[:, -1:], -torch.inf)
            scores += torch.stack([gumbel_noise(5, 1 + depth, ids) for depth in range(len(scores))])
        probs = scores.softmax(-1)
        assert tree.tokens.tolist() == ids[probs.argmax(-1)].tolist() and tree.is_chain
        np.testing.assert_allclose(tree.probs, probs.max(-1).values, rtol=1e-4)


@pytest.mark.parametrize("kind", ["dflash2", "dspark", "dspark, rnn"])
def test_children_are_those_of_their_parent(kind, tmp_path):
    """Each with its probability given that; the likeliest with the drafter's confidence, where it has one."""
    target = shared_model("llama")
    heads = BlockDrafter.from_pretrained(write(target, tmp_path, outputs=(-1, 0), **KINDS[kind]), target)
    source = BlockCandidates(heads, width=4)
    states = begun(source, "a", 9)
    (tree,) = source.propose(["a"], [40])
    anchors = torch.tensor([source._states["a"].tokens[-1]])
    hidden = run_block(heads, states, heads.embed(anchors, heads.block_size)[0])
    lattice = heads.lattice(hidden[None], anchors, 4)
    assert len(tree) == 40 and int(tree.depths.max()) > 2
    for node, (token, parent, depth) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), tree.depths)):
        place = lattice.tokens[0, depth - 1].tolist().index(token)
        line, before = lattice.first[0].exp(), 0
        if parent >= 0:
            before = lattice.tokens[0, depth - 2].tolist().index(int(tree.tokens[parent]))
            line = lattice.given[0, depth - 2, before].exp()
        prob = line[place]
        if lattice.confidence is not None:
            sure = lattice.confidence[0, depth - 1, before]
            prob = sure if place == int(line.argmax()) else (1 - sure) * prob / (1 - line.max())
        assert tree.probs[node] == pytest.approx(float(prob), rel=1e-3)


@pytest.mark.parametrize("kind", ["dflash2", "dspark"])
def test_what_heads_add_is_divided_by_the_temperature_too(kind, tmp_path):
    """Chains are those of the target's noise on the sums of logits and of what follows from the token before."""
    target, options = shared_model("llama"), KINDS[kind] | {"confidence": None}
    heads = BlockDrafter.from_pretrained(write(target, tmp_path, outputs=(-1, 0), **options), target)
    source = BlockCandidates(heads, width=1)
    states = begun(source, "a", 9, seed=5)
    source._states["a"].processing = ScoreProcessing([TemperatureLogitsWarper(0.25)])
    (tree,) = source.propose(["a"], [9])
    token = source._states["a"].tokens[-1]
    hidden = run_block(heads, states, heads.embed(torch.tensor([token]), heads.block_size)[0])[heads.first_slot :]
    logits, tokens, probs = heads.logits(hidden), [], []
    for depth in range(heads.num_depths):
        noise = gumbel_noise(5, 1 + depth, torch.arange(VOCAB_SIZE))
        if kind == "dspark":
            head = heads.markov_head
            scores = (logits[depth] + head.markov_w2(head.markov_w1.weight[token])) / 0.25 + noise
        else:
            head = heads.candidate_selector
            pair = head.predecessor_codebook[token] * head.hidden_projection(hidden[depth])
            scores = torch.full((VOCAB_SIZE,), -torch.inf)
            best = (logits[depth] / 0.25 + noise).topk(head.num).indices
            scores[best] = ((logits[depth] + head.successor_codebook @ pair) / 0.25 + noise)[best]
        token = int(scores.argmax())
        tokens.append(token)
        probs.append(float(scores.softmax(-1)[token]))
    assert tree.tokens.tolist() == tokens
    np.testing.assert_allclose(tree.probs, probs, rtol=1e-3)


def test_a_price_of_nodes_ends_trees_and_its_shape_is_followed(heads):
    source = BlockCandidates(heads)
    begun(source, "a", 9)
    (every,) = source.propose(["a"], [60])
    price = float(np.sort(every.path_probs)[-7]) * (1 - 1e-5)
    (few,) = source.propose(["a"], [60], LevelPrice(0.0, 0.0, price))
    assert few.tokens.tolist() == every.tokens[:7].tolist() and few.parents.tolist() == every.parents[:7].tolist()
    (trusted,) = source.propose(["a"], [60], LevelPrice(0.0, 0.0, price, trust=0.5))
    assert 0 < len(trusted) < len(few)
    (one,) = source.propose(["a"], [60], LevelPrice(0.0, 0.0, 1.0))
    assert len(one) == 1
    (shaped,) = source.propose(["a"], [60], LevelPrice(0.0, 0.0, 0.0, widths=(3, 2, 1)))
    assert np.bincount(shaped.depths).tolist() == [0, 3, 6, 6]


def test_blocks_have_no_more_slots_than_trees_can_have_depths(heads, monkeypatch):
    sizes, blocks = [], BlockForward.blocks
    monkeypatch.setattr(BlockForward, "blocks", lambda *args: sizes.append(args[-1]) or blocks(*args))
    source = BlockCandidates(heads)
    begun(source, "a", 9)
    begun(source, "b", 5)
    for limits in ([2, 1], [0, 4], [60, 1]):
        trees = source.propose(["a", "b"], limits)
        assert [len(tree) for tree in trees] == limits
    assert sizes == [heads.first_slot + 2, heads.first_slot + 4, heads.block_size]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [({"is_domino": True, "from_anchor": True}, [4, 6, 6]), ({"is_xpress": True}, [6, 6, 6])],
)
def test_blocks_have_the_slots_that_they_were_trained_with(tmp_path, monkeypatch, kind, expected):
    """Domino's last one may predict nothing, and is seen by the others; xPress reads the mean of all."""
    target, sizes, blocks = shared_model("llama"), [], BlockForward.blocks
    monkeypatch.setattr(BlockForward, "blocks", lambda *args: sizes.append(args[-1]) or blocks(*args))
    folder = write(target, tmp_path, outputs=(-1, 0), **kind)
    source = BlockCandidates(BlockDrafter.from_pretrained(folder, target), width=1)
    begun(source, "a", 9)
    assert [len(source.propose(["a"], [limit])[0]) for limit in (4, 5, 9)] == [4, 5, 5]
    assert sizes == expected


def test_requests_without_all_hidden_states_get_no_draft(heads):
    source = BlockCandidates(heads)
    begun(source, "a", 9)
    assert len(source.propose(["a"], [5])[0]) == 5
    source.observe("a", Committed(np.array([5]), hidden_states={0: torch.randn(1, 32), 1: torch.randn(1, 32)}, start=9))
    assert len(source.propose(["a"], [5])[0]) == 0


@pytest.mark.adaptive
def test_a_loaded_batch_is_asked_for_no_block(target, folder):
    """Blocks that are never accepted: after some trials, hardly a step drafts."""
    texts = [row.tolist() for row in prompts([8] * 6)["input_ids"]]
    source = source_of(BlockDrafter.from_pretrained(folder, target), Calibrator(), None)
    calls, propose = [], source.propose

    def counted(names, max_nodes, price=None):
        calls.append(len(names))
        return propose(names, max_nodes, price)

    source.propose = counted
    with Engine(target, SmartSpecConfig(source), max_batch_size=6) as engine:
        names = [engine.add_request(text, **GREEDY | {"max_new_tokens": 120}) for text in texts]
        outputs = [engine.get_result(name, timeout=TIMEOUT) for name in names]
    assert all(output.error is None for output in outputs)
    assert 0 < len(calls) < 40


def test_numbers_below_one_are_refused(heads):
    for option in ("num_nodes", "width"):
        with pytest.raises(ValueError, match=f"`{option}`"):
            BlockCandidates(heads, **{option: 0})


@torch.no_grad()
def test_drafts_are_those_of_transformers_own_class(tmp_path):
    """Which drafts chains for one sequence, from hidden states that its loop passes on."""
    target = shared_model("llama")
    config = MuseGlimmerAssistantConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, max_position_embeddings=512, sliding_window=64, block_size=4, mask_token_id=3,
        target_layer_ids=[0], bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    assistant, known = spread(MuseGlimmerAssistantModel(config)), [plain(target, prompt) for prompt in PROMPTS]
    assistant.save_pretrained(tmp_path)
    parts = target.get_input_embeddings(), target.lm_head
    source = BlockCandidates(BlockDrafter.from_pretrained(tmp_path, target), width=1)
    count = 0
    for prompt in PROMPTS:
        build = partial(_DFlash, assistant, *parts, GenerationConfig(max_length=512))
        for text, draft in by_transformers(target, build, prompt, known).items():
            hidden = target(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states[1][0]
            source.start(text, np.array(text[:-1]))
            source.observe(text, Committed(np.array(text[-1:]), hidden_states={1: hidden}))
            (tree,) = source.propose([text], [3])
            assert tree.tokens.tolist() == draft
            count += 1
    assert count > 10
