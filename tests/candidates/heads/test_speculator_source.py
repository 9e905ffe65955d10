"""MLP speculators that draft: the tokens of plain decoding, in batches, as trees as deep as they have steps."""

import copy

import numpy as np
import pytest
import torch

import hf_smartspec
from hf_smartspec import Committed, Engine, MLPSpeculator, MLPSpeculatorCandidates, SmartSpecConfig
from hf_smartspec.candidates.models import growing

from ...covering import exhaustive
from ...generate.helpers import prompts, tiny_llama
from ...models import VOCAB_SIZE, new_model
from ...serving.helpers import TIMEOUT
from .speculator import NUM_STEPS, logits_along, random_speculator, write
from .test_medusa_source import GREEDY, LENGTHS, NUM_TOKENS, SAMPLED

WAYS = {"greedy": GREEDY, "sampled": SAMPLED, "chunks": GREEDY | {"prefill_chunk_size": 4}}


def trained_speculator(model, inputs, inner=128):
    """Steps whose heads know by heart what the model says behind these prompts; all else is random."""
    with torch.no_grad():
        text = model.generate(**inputs, **GREEDY)
        mask = torch.cat([inputs["attention_mask"], torch.ones(len(text), NUM_TOKENS, dtype=torch.long)], dim=1)
        states = model.base_model(text, attention_mask=mask).last_hidden_state
    hidden, vocab = model.config.hidden_size, model.config.vocab_size
    steps = random_speculator(hidden, vocab, inner)
    start, end = inputs["input_ids"].shape[1] - 1, text.shape[1] - NUM_STEPS - 1
    speculator = MLPSpeculator(
        {
            "emb.weight": [step[0] for step in steps],
            "proj.weight": [step[1] for step in steps],
            "ln.weight": [step[2][0] for step in steps],
            "ln.bias": [step[2][1] for step in steps],
            "head.weight": [step[3] for step in steps],
        },
        NUM_STEPS,
    )
    x = states[:, start:end].flatten(0, 1)
    for number, step in enumerate(steps):
        x, _ = speculator(text[:, start + 1 + number : end + 1 + number].flatten(), x, number)
        wanted = torch.nn.functional.one_hot(text[:, start + 2 + number : end + 2 + number].flatten(), vocab).float()
        steps[number] = (*step[:3], torch.linalg.lstsq(x, wanted, driver="gelsd").solution.T * 20)
    return steps


@pytest.fixture(scope="module")
def target():
    model = tiny_llama(eos_token_id=None)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def folder(target, tmp_path_factory):
    path = tmp_path_factory.mktemp("speculator")
    write(trained_speculator(target, prompts(LENGTHS)), path)
    return str(path)


ASSISTANTS = {
    "folder": lambda folder, target: folder,
    "speculator": lambda folder, target: MLPSpeculator.from_pretrained(folder, target),
    "chain": lambda folder, target: SmartSpecConfig(folder, num_nodes=5),
    "tree": lambda folder, target: SmartSpecConfig(folder, num_nodes=12, width=3),
    "with suffix trees": lambda folder, target: ["suffix", folder],
}


@pytest.mark.parametrize("name", ASSISTANTS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS[:1]])
def test_tokens_are_those_of_plain_decoding(target, folder, name, way, lengths):
    inputs, options = prompts(lengths), WAYS[way]
    with hf_smartspec.enabled(target):
        expected = target.generate(**inputs, **options, assistant="none")
        output = target.generate(
            **inputs, **options, assistant=ASSISTANTS[name](folder, target), return_dict_in_generate=True
        )
    assert torch.equal(output.sequences, expected)
    assert output.statistics.accepted_tokens <= output.statistics.drafted_tokens
    assert output.statistics.accepted_tokens or lengths is not LENGTHS, "a single sampled row may be out of luck"
    if way == "greedy" and lengths is LENGTHS:
        assert output.statistics.accepted_tokens > 0.4 * NUM_TOKENS * len(lengths), "it knows them by heart"


@pytest.mark.parametrize("architecture", ["gemma2", "bloom", *exhaustive(["gpt2"])])
def test_a_random_speculator_changes_nothing(architecture, tmp_path):
    """Of packed models and of those that are run row by row."""
    model = new_model(architecture, eos_token_id=None)
    model.generation_config.eos_token_id = None
    write(random_speculator(model.config.hidden_size, VOCAB_SIZE), tmp_path, scales_input=True)
    inputs = prompts(LENGTHS)
    for options in (GREEDY, SAMPLED):
        with hf_smartspec.enabled(model):
            expected = model.generate(**inputs, **options, assistant="none")
            output = model.generate(**inputs, **options, assistant=str(tmp_path), return_dict_in_generate=True)
        assert torch.equal(output.sequences, expected) and output.statistics.drafted_tokens > 0


def test_requests_of_an_engine_draft_together(target, folder, monkeypatch):
    """Also behind prefixes whose keys and values are there already, and while others are cancelled."""
    sizes, forward = [], MLPSpeculator.forward
    monkeypatch.setattr(
        MLPSpeculator, "forward", lambda self, tokens, *rest: sizes.append(len(tokens)) or forward(self, tokens, *rest)
    )
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


@pytest.mark.parametrize(("width", "num_nodes"), [(1, 9), (3, 14)])
def test_drafts_follow_the_published_arithmetic_and_end_with_the_steps(target, folder, width, num_nodes):
    speculator = MLPSpeculator.from_pretrained(folder, target)
    steps = trained_speculator(target, prompts(LENGTHS))
    source = MLPSpeculatorCandidates(speculator, num_nodes=num_nodes, width=width)
    generator = torch.Generator().manual_seed(4)
    states = torch.randn(5, target.config.hidden_size, generator=generator)
    names = list(range(len(states)))
    for name in names:
        source.start(name, np.array([3, 4]))
    assert all(len(tree) == 0 for tree in source.propose(names, [num_nodes] * 5)), "nothing is known yet"
    for name, state in zip(names, states):
        source.observe(name, Committed(np.array([5, 6 + name]), hidden_states={-1: torch.stack([state * 0, state])}))
    for name, tree in zip(names, source.propose(names, [num_nodes] * 5)):
        paths = [[]]
        for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist()):
            paths.append([*paths[parent + 1], token])
        assert max(map(len, paths)) == NUM_STEPS and len(tree) == (NUM_STEPS if width == 1 else num_nodes)
        for path, prob in zip(paths[1:], tree.probs):
            logits = logits_along(steps, states[name], [6 + name, *path[:-1]])[len(path) - 1]
            assert path[-1] in logits.topk(width).indices
            torch.testing.assert_close(float(logits.softmax(-1)[path[-1]]), float(prob), rtol=1e-4, atol=1e-5)
    for name in [*names, "never started"]:
        source.stop(name)
    assert not source._states


def test_levels_that_are_sent_at_once_draft_the_same(target, folder, monkeypatch):
    """As on devices, where nobody looks at a level before the next one is run."""
    speculator, drafts = MLPSpeculator.from_pretrained(folder, target), []
    states = torch.randn(4, target.config.hidden_size, generator=torch.Generator().manual_seed(4))
    for is_free in (True, False):
        monkeypatch.setattr(growing, "waits_are_free", lambda device, is_free=is_free: is_free)
        source = MLPSpeculatorCandidates(speculator, num_nodes=9, width=3)
        for name, state in enumerate(states):
            source.start(name, np.array([3, 4]))
            source.observe(name, Committed(np.array([5 + name]), hidden_states={-1: state[None]}))
        trees = source.propose(range(4), [9] * 4)
        drafts.append([(tree.tokens.tolist(), tree.parents.tolist()) for tree in trees])
    assert drafts[0] == drafts[1] and all(len(tokens) == 9 for tokens, _ in drafts[0])


def test_speculators_of_another_target_are_refused_before_anything_is_run(folder):
    other = new_model("llama", hidden_size=48, num_attention_heads=4, num_key_value_heads=2)
    with hf_smartspec.enabled(other), pytest.raises(ValueError, match="hidden size 48"):
        other.generate(**prompts(LENGTHS), **GREEDY, assistant=folder)


def test_a_speculator_of_another_dtype_drafts(target, folder):
    speculator = copy.deepcopy(MLPSpeculator.from_pretrained(folder, target)).bfloat16()
    with hf_smartspec.enabled(target):
        expected = target.generate(**prompts(LENGTHS), **GREEDY)
        output = target.generate(**prompts(LENGTHS), **GREEDY, assistant=speculator, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected) and output.statistics.accepted_tokens > 0
