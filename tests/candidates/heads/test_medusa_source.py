"""Medusa heads that draft: the tokens of plain decoding, and nodes where the heads have been right."""

import gc

import numpy as np
import pytest
import torch

import hf_smartspec
from hf_smartspec import Committed, Engine, MedusaCandidates, MedusaHeads, SmartSpecConfig
from hf_smartspec.goodput import Calibrator, CostModel, TreeGoodput
from hf_smartspec.prepare.sources import Drafters, resolve

from ...covering import exhaustive
from ...generate.helpers import prompts, tiny_llama
from ...models import VOCAB_SIZE, new_model
from ...serving.helpers import TIMEOUT
from .published import LAYOUTS, random_heads

LENGTHS = (9, 5, 12)
NUM_TOKENS = 24
GREEDY = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None}
SAMPLED = {"max_new_tokens": NUM_TOKENS, "do_sample": True, "seed": 3, "temperature": 0.7, "eos_token_id": None}

WAYS = {"greedy": GREEDY, "sampled": SAMPLED, "chunks": GREEDY | {"prefill_chunk_size": 4}}


def trained_heads(model, inputs, num_heads=3):
    """Heads that know by heart what the model says behind these prompts: `[(blocks, output), ...]`."""
    with torch.no_grad():
        text = model.generate(**inputs, **GREEDY)
        mask = torch.cat([inputs["attention_mask"], torch.ones(len(text), NUM_TOKENS, dtype=torch.long)], dim=1)
        states = model.base_model(text, attention_mask=mask).last_hidden_state
    start = inputs["input_ids"].shape[1] - 1
    heads = []
    for head in range(num_heads):
        ahead = head + 2
        x = states[:, start : text.shape[1] - ahead].flatten(0, 1)
        wanted = torch.nn.functional.one_hot(text[:, start + ahead :].flatten(), model.config.vocab_size).float()
        output = torch.linalg.lstsq(x, wanted).solution.T * 20
        hidden = x.shape[1]
        heads.append(([(torch.zeros(hidden, hidden), None)], output))
    return heads


@pytest.fixture(scope="module")
def target():
    model = tiny_llama(eos_token_id=None)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def folder(target, tmp_path_factory):
    path = tmp_path_factory.mktemp("heads")
    LAYOUTS["pickled"](trained_heads(target, prompts(LENGTHS)), path)
    return str(path)


def tree_goodput() -> TreeGoodput:
    """Return the policy for forwards of 10 ms: on models as small as the tests', drafts cost more than they bring."""
    cost = CostModel(0.0, 1e-5, 1e-2)
    cost.observe = lambda *measured: None  # which would correct that
    return TreeGoodput(cost)


ASSISTANTS = {
    "folder": lambda folder, target: folder,
    "heads": lambda folder, target: MedusaHeads.from_pretrained(folder, target),
    "auto nodes": lambda folder, target: SmartSpecConfig(folder, num_nodes=12),
    "fixed tree": lambda folder, target: MedusaCandidates(
        MedusaHeads.from_pretrained(folder, target), tree=[(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]
    ),
    "with suffix trees": lambda folder, target: ["suffix", folder],
    "full trees": lambda folder, target: SmartSpecConfig(folder, policy=tree_goodput()),
}


@pytest.mark.parametrize("name", ASSISTANTS)
@pytest.mark.parametrize(
    "options", [GREEDY, SAMPLED, GREEDY | {"prefill_chunk_size": 4}], ids=["greedy", "sampled", "chunks"]
)
@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS[:1]])
def test_tokens_are_those_of_plain_decoding(target, folder, name, options, lengths):
    inputs = prompts(lengths)
    with hf_smartspec.enabled(target):
        expected = target.generate(**inputs, **options, assistant="none")
        output = target.generate(
            **inputs, **options, assistant=ASSISTANTS[name](folder, target), return_dict_in_generate=True
        )
    assert torch.equal(output.sequences, expected)
    assert 0 < output.statistics.accepted_tokens <= output.statistics.drafted_tokens
    if options is GREEDY and lengths is LENGTHS:
        assert output.statistics.accepted_tokens > 0.4 * NUM_TOKENS * len(lengths), "they know it by heart"


@pytest.mark.parametrize("architecture", ["mistral", "bloom", *exhaustive(["gemma2"], ["gpt2"], ["phi"])])
def test_random_heads_change_nothing(architecture, tmp_path):
    """Of packed models and of those that are run row by row."""
    model = new_model(architecture, eos_token_id=None)
    model.generation_config.eos_token_id = None
    LAYOUTS["blocks"](random_heads(model.config.hidden_size, VOCAB_SIZE), tmp_path)
    inputs = prompts(LENGTHS)
    for options in (GREEDY, SAMPLED):
        with hf_smartspec.enabled(model):
            expected = model.generate(**inputs, **options, assistant="none")
            output = model.generate(**inputs, **options, assistant=str(tmp_path), return_dict_in_generate=True)
        assert torch.equal(output.sequences, expected) and output.statistics.drafted_tokens > 0


def test_requests_of_an_engine_draft_together(target, folder, monkeypatch):
    """Also behind prefixes whose keys and values are there already, and while others are cancelled."""
    sizes, forward = [], MedusaHeads.forward
    monkeypatch.setattr(MedusaHeads, "forward", lambda self, states: sizes.append(len(states)) or forward(self, states))
    texts = [row[mask.bool()].tolist() for row, mask in zip(*prompts(LENGTHS).values())]
    with Engine(target, folder, max_batch_size=4) as engine:
        for _ in range(2):
            with engine.pause():
                names = [engine.add_request(text, **GREEDY) for text in texts]
                dropped = engine.add_request(texts[0], max_new_tokens=200, eos_token_id=None)
            outputs = [engine.get_result(name, timeout=TIMEOUT) for name in names]
            engine.cancel_request(dropped)
            for text, output in zip(texts, outputs):
                expected = target.generate(torch.tensor([text]), attention_mask=torch.ones(1, len(text)), **GREEDY)
                assert output.generated_tokens == expected[0, len(text) :].tolist()
        assert engine.statistics.accepted_tokens > NUM_TOKENS
    assert max(sizes) >= len(texts)


def test_heads_are_loaded_once_and_shared(target, folder):
    drafters = Drafters()
    with hf_smartspec.enabled(target):
        sources = [resolve(folder, target, drafters).source for _ in range(2)]
        other = resolve(folder, target, Drafters()).source
    assert sources[0] is sources[1] is not other and other.heads is sources[0].heads
    assert other.name == sources[0].name
    del sources
    gc.collect()
    assert not len(drafters)


@pytest.mark.parametrize("comes_true", [True, False])
def test_probabilities_are_what_has_come_true(target, tmp_path, comes_true):
    LAYOUTS["pickled"](random_heads(target.config.hidden_size, target.config.vocab_size), tmp_path)
    heads = MedusaHeads.from_pretrained(tmp_path, target)
    source = MedusaCandidates(heads, calibrator=Calibrator())
    source.start("a", np.array([3, 4]))
    hidden = torch.randn(target.config.hidden_size, generator=torch.Generator().manual_seed(0))
    tokens, probs = heads.best(hidden[None], 8)
    first = int(tokens[0, 0, 0])
    wrong = next(token for token in range(VOCAB_SIZE) if token not in tokens[0, 0])
    raw = float(probs[0, 0, 0])
    for number in range(100):
        source.observe("a", Committed(np.array([first if comes_true else wrong]), hidden_states={-1: hidden[None]}))
        (tree,) = source.propose(["a"], [6])
        share = float(tree.probs[tree.child(-1, first)])
        if number == 0:
            assert share == pytest.approx(raw, rel=1e-2) and 0.02 < raw < 0.5
    assert share > 0.6 if comes_true else share < 0.5 * raw
    source.stop("a")
    source.stop("never started")
    assert not source._states


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_nodes": 0}, "num_nodes"),
        ({"tree": []}, "at least one path"),
        ({"tree": [(0, 0)]}, "go on from"),
        ({"tree": [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]}, "1 to 3 ranks"),
        ({"tree": [(-1,)]}, "0 or more"),
    ],
)
def test_bad_arguments_are_refused(target, folder, options, match):
    with pytest.raises(ValueError, match=match):
        MedusaCandidates(MedusaHeads.from_pretrained(folder, target), **options)


@pytest.mark.parametrize("kind", ["folder", "heads", "source"])
def test_heads_of_another_target_are_refused_before_anything_is_run(target, folder, kind):
    other = new_model("llama", hidden_size=48, num_attention_heads=4, num_key_value_heads=2)
    heads = MedusaHeads.from_pretrained(folder, target)
    assistant = {"folder": folder, "heads": heads, "source": MedusaCandidates(heads)}[kind]
    with hf_smartspec.enabled(other), pytest.raises(ValueError, match="hidden size 48"):
        other.generate(**prompts(LENGTHS), **GREEDY, assistant=assistant)


def test_heads_of_another_dtype_draft(target, folder):
    heads = MedusaHeads.from_pretrained(folder, target).bfloat16()
    with hf_smartspec.enabled(target):
        expected = target.generate(**prompts(LENGTHS), **GREEDY)
        output = target.generate(**prompts(LENGTHS), **GREEDY, assistant=heads, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected) and output.statistics.accepted_tokens > 0


def test_a_fixed_tree_is_drafted_whole_or_its_first_nodes(target, folder):
    paths = [(9,), (0,), (2,), (0, 3), (0, 0), (2, 1), (0, 0, 0)]
    source = MedusaCandidates(MedusaHeads.from_pretrained(folder, target), tree=paths)
    assert source.default_num_nodes == 7
    hidden = torch.randn(target.config.hidden_size)
    tokens, _ = source.heads.best(hidden[None], 10)
    source.start("a", np.array([3]))
    source.observe("a", Committed(np.array([5]), hidden_states={-1: hidden[None]}))
    expected = [int(tokens[0, len(path) - 1, path[-1]]) for path in paths]
    for limit in (7, 4, 1):
        (tree,) = source.propose(["a"], [limit])
        assert tree.tokens.tolist() == expected[:limit]
    assert len(source.propose(["a"], [0])[0]) == 0
