"""
Heads and block drafters on an accelerator: the same tokens as on the CPU, and one wait for all of a draft.
`test_accelerator.py` runs this file in a process of its own.
"""
# ruff: noqa: F401, F811  (fixtures)

import pytest

import hf_smartspec
from hf_smartspec import BlockDrafter, SmartSpecConfig
from hf_smartspec.candidates.heads.eagle.heads import EagleHeads
from hf_smartspec.candidates.heads.eagle.parallel import ParallelCandidates
from hf_smartspec.candidates.heads.feature_source import FeatureCandidates

from .accelerator_cases import (
    CHAIN,
    LENGTHS,
    NUM_TOKENS,
    OPTIONS,
    tokens_of,
)
from .candidates.heads.blocks.published import random_drafter, z_lab
from .candidates.heads.by_heart import texts_of, trained_eagle
from .candidates.heads.fitted import fitted_parallel
from .covering import exhaustive
from .generate.helpers import prompts
from .on_accelerator import accelerator, expected, on_cpu, on_device, steps, without_inference_mode

pytestmark = pytest.mark.usefixtures("every_trial")


@pytest.fixture(scope="module")
def eagle(on_cpu, tmp_path_factory):
    folder = tmp_path_factory.mktemp("eagle")
    trained_eagle(on_cpu[0], texts_of(on_cpu[0], prompts(LENGTHS), NUM_TOKENS), steps=40).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("name", "width"), [("sampled", 1), ("greedy", 3), *exhaustive(("greedy", 1), ("sampled", 3))])
def test_heads_draft_all_levels_at_once(on_cpu, on_device, expected, steps, eagle, name, width):
    """EAGLE's, whose levels take what those above have left: the same trees, and one wait for all of a draft."""
    inputs = prompts(LENGTHS)
    found = []
    for target in (on_cpu[0], on_device[0]):
        heads = EagleHeads.from_pretrained(eagle, target)
        assert heads.device == target.device
        config = SmartSpecConfig(FeatureCandidates(heads, width=width), num_nodes=CHAIN * width)
        steps.clear()
        with hf_smartspec.enabled(target):
            ids = {key: item.to(target.device) for key, item in inputs.items()}
            settings = {"max_new_tokens": NUM_TOKENS, "return_dict_in_generate": True} | OPTIONS[name]
            found.append(target.generate(**ids, assistant=config, **settings))
    assert tokens_of(found[0]) == tokens_of(found[1]) == tokens_of(expected[name])
    statistics = [(item.statistics.drafted_tokens, item.statistics.accepted_tokens) for item in found]
    assert statistics[0] == statistics[1] and statistics[0][1] > 0
    assert max(counts["waits"] for counts in steps) == 2, "for the draft, and for the picks"


@pytest.mark.parametrize("name", ["sampled", *exhaustive(["greedy"])])
def test_blocks_are_drafted_with_one_wait(on_cpu, on_device, expected, steps, tmp_path, name):
    vocab = on_cpu[0].config.vocab_size
    drafter = random_drafter(on_cpu[0].config.hidden_size, vocab, windows=(6, None), causal=(True, False), own_vocab=30)
    z_lab(drafter, vocab, tmp_path)
    inputs, found = prompts(LENGTHS), []
    for target in (on_cpu[0], on_device[0]):
        heads = BlockDrafter.from_pretrained(tmp_path, target)
        assert heads.device == target.device
        steps.clear()
        with hf_smartspec.enabled(target):
            ids = {key: item.to(target.device) for key, item in inputs.items()}
            settings = {"max_new_tokens": NUM_TOKENS, "return_dict_in_generate": True} | OPTIONS[name]
            found.append(target.generate(**ids, assistant=SmartSpecConfig(heads, num_nodes=9), **settings))
    assert tokens_of(found[0]) == tokens_of(found[1]) == tokens_of(expected[name])
    statistics = [(item.statistics.drafted_tokens, item.statistics.accepted_tokens) for item in found]
    assert statistics[0] == statistics[1] and statistics[0][0] > NUM_TOKENS
    assert max(counts["waits"] for counts in steps) == 2, "for the draft, and for the picks"


@pytest.mark.parametrize("name", ["sampled", *exhaustive(["greedy"])])
def test_parallel_heads_draft_with_one_wait(on_cpu, on_device, expected, steps, tmp_path, name):
    texts = on_cpu[0].generate(**prompts(LENGTHS[:1]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None)
    fitted_parallel(on_cpu[0], texts).save_pretrained(tmp_path)
    inputs, found = prompts(LENGTHS), []
    for target in (on_cpu[0], on_device[0]):
        heads = EagleHeads.from_pretrained(tmp_path, target)
        steps.clear()
        with hf_smartspec.enabled(target):
            ids = {key: item.to(target.device) for key, item in inputs.items()}
            settings = {"max_new_tokens": NUM_TOKENS, "return_dict_in_generate": True} | OPTIONS[name]
            config = SmartSpecConfig(ParallelCandidates(heads), num_nodes=9)
            found.append(target.generate(**ids, assistant=config, **settings))
    assert tokens_of(found[0]) == tokens_of(found[1]) == tokens_of(expected[name])
    statistics = [(item.statistics.drafted_tokens, item.statistics.accepted_tokens) for item in found]
    assert statistics[0] == statistics[1] and statistics[0][0] > NUM_TOKENS
    assert max(counts["waits"] for counts in steps) == 2, "for the draft, and for the picks"
