"""Heads of P-EAGLE: all depths of a draft in one forward, by the published arithmetic."""

from itertools import product

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import hf_smartspec
from hf_smartspec import Committed, EagleHeads, FixedLength, SmartSpecConfig
from hf_smartspec.candidates import ParallelCandidates
from hf_smartspec.candidates.heads.kinds import load, source_of
from hf_smartspec.drafts.price import LevelPrice
from hf_smartspec.goodput import Calibrator
from hf_smartspec.online.students import check_student
from hf_smartspec.training.eagle import EagleTraining, new_heads

from ...generate.helpers import prompts, tiny_llama
from ...models import shared_model
from .eagle_forwards import texts
from .fitted import fitted_parallel
from .published_eagle import LAYOUTS, parallel_logits, random_heads
from .test_medusa_source import GREEDY, LENGTHS, NUM_TOKENS, WAYS

KINDS = {
    "one layer": {"layers": (1, 2, 0), "has_input_norm": True},
    "two layers": {
        "layers": (1, 0), "num_layers": 2, "window": 5, "sliding": (1,), "has_fc_norm": True, "norm_output": True,
    },
}  # fmt: skip


def write(kind, target, folder):
    published = random_heads(32, 97, third=True, own_vocab=60, mask_token=96, head_dim=16, inner=64, **KINDS[kind])
    published.tensors["embed_tokens.weight"] = torch.randn(97, 32, generator=torch.Generator().manual_seed(5))
    LAYOUTS["speculators"](published, 97, folder)
    return published, EagleHeads.from_pretrained(folder, target)


def show(source, name, text, states, start=0) -> None:
    """The hidden states of a text's tokens from `start` on, but the last, whose own are unknown."""
    layers = {layer: item[start:] for layer, item in zip(source.hidden_layers, states.split(32, dim=1))}
    num_new = 1 if not start else len(text) - 1 - start
    source.observe(name, Committed(text[-num_new:].numpy(), hidden_states=layers, start=start))


def begun(source, items) -> list[str]:
    names = [f"request {number}" for number in range(len(items))]
    for name, (text, states) in zip(names, items):
        source.start(name, text[:-1].numpy())
        show(source, name, text, states)
    return names


def probs_of(published, target, item, num) -> torch.Tensor:
    """Probabilities `[num, 97]` of the published arithmetic at each depth."""
    probs = torch.zeros(num, 97)
    probs[:, published.token_ids] = parallel_logits(published, target, *item, num).softmax(-1)
    return probs


@pytest.mark.parametrize("kind", KINDS)
def test_depths_are_those_of_the_published_arithmetic(kind, tmp_path):
    """Of rows of several lengths, and of drafts of fewer depths, which a deeper one begins with."""
    target = shared_model("llama")
    published, heads = write(kind, target, tmp_path)
    items = texts(published, target, (9, 2, 30, 14))
    for limits in ([6] * 4, [1, 6, 3, 2], [2, 1, 1, 2]):
        source = source_of(heads, Calibrator(), width=1)
        assert isinstance(source, ParallelCandidates) and source.num_depths == 6
        for limit, item, tree in zip(limits, items, source.propose(begun(source, items), limits)):
            expected = probs_of(published, target, item, limit)
            assert tree.tokens.tolist() == expected.argmax(-1).tolist() and len(tree) == limit
            assert tree.parents.tolist() == [*range(-1, limit - 1)]
            np.testing.assert_allclose(tree.probs, expected.max(-1).values, atol=1e-5)


def test_trees_hold_the_likeliest_paths(tmp_path):
    target = shared_model("llama")
    published, heads = write("two layers", target, tmp_path)
    item = texts(published, target, (12,))[0]
    source = ParallelCandidates(heads)
    tree = source.propose(begun(source, [item]), [20])[0]
    best = probs_of(published, target, item, 6).topk(8)
    paths = {
        tuple(int(best.indices[depth, rank]) for depth, rank in enumerate(ranks)): float(
            torch.stack([best.values[depth, rank] for depth, rank in enumerate(ranks)]).prod()
        )
        for length in (1, 2, 3)
        for ranks in product(range(8), repeat=length)
    }
    expected = sorted(paths, key=lambda path: -paths[path])[:20]
    found = [()]
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist()):
        found.append((*found[parent + 1], token))
    assert set(found[1:]) == set(expected)
    shape = LevelPrice(0.0, 0.0, 0.0, widths=(3, 2))
    assert len(source.propose(["request 0"], [20], shape)[0]) == 3 + 3 * 2


def test_keys_and_values_of_masks_do_not_stay(tmp_path):
    target = shared_model("llama")
    published, heads = write("two layers", target, tmp_path)
    ((text, states),) = texts(published, target, (20,))
    source = ParallelCandidates(heads, width=1)
    name = begun(source, [(text[:12], states[:11])])[0]
    for start, end in ((11, 13), (12, 18), (17, 20)):
        source.propose([name], [6])
        show(source, name, text[:end], states[: end - 1], start)
        expected = probs_of(published, target, (text[:end], states[: end - 1]), 6)
        tree = source.propose([name], [6])[0]
        np.testing.assert_allclose(tree.probs, expected.max(-1).values, atol=1e-5)
    source.stop(name)


@pytest.fixture(scope="module")
def target():
    model = tiny_llama(eos_token_id=None)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def heads(target):
    """Heads that were fitted to what the target says."""
    inputs = prompts(LENGTHS[:1])
    return fitted_parallel(target, target.generate(**inputs, **GREEDY))


ASSISTANTS = {
    "heads": lambda heads: heads,
    "chain": lambda heads: SmartSpecConfig(ParallelCandidates(heads, width=1), policy=FixedLength(4)),
    "tree": lambda heads: SmartSpecConfig(ParallelCandidates(heads, calibrator=Calibrator()), num_nodes=16),
    "with suffix trees": lambda heads: ["suffix", heads],
}


@pytest.mark.parametrize("name", ASSISTANTS)
@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_plain_decoding(target, heads, name, way):
    inputs = prompts(LENGTHS)
    with hf_smartspec.enabled(target):
        expected = target.generate(**inputs, **WAYS[way], assistant="none")
        output = target.generate(**inputs, **WAYS[way], assistant=ASSISTANTS[name](heads), return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    assert 0 < output.statistics.accepted_tokens <= output.statistics.drafted_tokens


def test_heads_draft_what_they_were_fitted_to(target, heads):
    with hf_smartspec.enabled(target):
        config = SmartSpecConfig(ParallelCandidates(heads, calibrator=Calibrator()), policy=FixedLength(16))
        inputs, options = prompts(LENGTHS[:1]), {"assistant": config, "return_dict_in_generate": True}
        counts = target.generate(**inputs, **GREEDY, **options).statistics
    assert counts.accepted_tokens > NUM_TOKENS / 2


def test_what_does_not_fit_is_said(target, heads, tmp_path):
    llama = shared_model("llama")
    write("one layer", llama, tmp_path)
    assert load(str(tmp_path), llama).label == "peagle"
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for changed, said in (
        (tensors | {"mask_hidden": torch.ones(1, 1, 32)}, r"`mask_hidden` \(1, 1, 32\) .* that read 96 numbers"),
        ({name: item for name, item in tensors.items() if name != "mask_hidden"}, "by 'mask_token_id'.*no `mask_hid"),
    ):
        save_file(changed, path)
        with pytest.raises(ValueError, match=said):
            EagleHeads.from_pretrained(tmp_path, llama)
    save_file(tensors, path)
    config = (tmp_path / "config.json").read_text()
    for entry, said in (
        ('"mask_token_id": 97', "`mask_token_id` is 97, and the target has 97 tokens"),
        ('"mask_token_id": 3, "para_depths": 0', "`para_depths` .* at least 1, got 0"),
    ):
        (tmp_path / "config.json").write_text(config.replace('"mask_token_id": 96', entry))
        with pytest.raises(ValueError, match=said):
            EagleHeads.from_pretrained(tmp_path, llama)
    with pytest.raises(ValueError, match="no `mask_hidden`"):
        ParallelCandidates(new_heads(target))
    with pytest.raises(ValueError, match="P-EAGLE"):
        EagleTraining(target, heads)
    with pytest.raises(ValueError, match="P-EAGLE, cannot learn while they serve"):
        check_student(heads, target)
