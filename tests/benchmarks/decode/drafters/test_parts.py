"""Parts of `benchmarks drafters`: fixed trees, drafters of an enlarged target, and equal drafting time."""

from itertools import product

import numpy as np
import pytest
import torch

import hf_smartspec
from benchmarks.decode.drafters.report import _equal_times, _together, at_equal_time, block_claims
from benchmarks.decode.drafters.runs import accuracies, best_fixed_tree, mixed
from hf_smartspec import SmartSpecConfig
from hf_smartspec.candidates.heads.kinds import source_of
from hf_smartspec.commands.common.cost_matched import enlarge
from hf_smartspec.commands.common.drafters import NarrowedCandidates
from hf_smartspec.commands.common.recordings import DataSet, Recording
from hf_smartspec.decoding.statistics import GenerationStatistics
from hf_smartspec.goodput import Calibrator
from tests.candidates.heads.fitted import fitted_eagle, fitted_heads, fitted_speculator
from tests.generate.helpers import prompts, tiny_llama

NUM_TOKENS = 20
GREEDY = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None}


@pytest.fixture(scope="module")
def target():
    return tiny_llama(eos_token_id=None)


@pytest.fixture(scope="module")
def texts(target):
    return target.generate(**prompts([6] * 12), **GREEDY)


@pytest.fixture(scope="module")
def heads(target, texts):
    return fitted_heads(target, texts)


@pytest.mark.parametrize("num_nodes", [1, 5, 20])
def test_the_best_fixed_tree_has_the_most_accurate_paths(num_nodes):
    shares = np.sort(np.random.default_rng(0).random((3, 4)), axis=1)[:, ::-1]
    paths = [path for depth in (1, 2, 3) for path in product(range(4), repeat=depth)]
    values = {path: np.prod([shares[depth, rank] for depth, rank in enumerate(path)]) for path in paths}
    tree = best_fixed_tree(shares, num_nodes)
    assert len(set(tree)) == num_nodes and set(tree) == set(sorted(paths, key=values.get)[-num_nodes:])
    assert all(path[:-1] in {(), *tree[:place]} for place, path in enumerate(tree)), "parents come first"


def test_accuracies_are_shares_of_the_right_tokens(target, texts, heads):
    recordings = [Recording(row[:6].numpy(), row[6:].numpy()) for row in texts[:4]]
    found = accuracies(heads, target, recordings)
    expected, num = np.zeros_like(found), np.zeros(len(found))
    for row in texts[:4]:
        states = target.base_model(row[None]).last_hidden_state[0].detach()
        best = heads(states).topk(found.shape[1], dim=-1).indices
        for head in range(heads.num_heads):
            for place in range(5, len(row) - head - 2):
                expected[head] += (best[place, head] == row[place + head + 2]).numpy()
                num[head] += 1
    assert np.allclose(found, expected / num[:, None]) and found.max() > 0.2


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("fit", [fitted_heads, fitted_speculator, fitted_eagle])
def test_drafts_for_an_enlarged_target_are_those_for_the_small_one(target, texts, fit, batch_size):
    drafter, large = fit(target, texts), enlarge(target, 400_000)
    inputs = {"input_ids": texts[:batch_size, :6], "attention_mask": torch.ones(batch_size, 6, dtype=torch.long)}
    outputs = []
    for model in (target, large):
        source = source_of(drafter, Calibrator(), 2)
        if model is large:
            source = NarrowedCandidates(source, target.config.hidden_size)
        with hf_smartspec.enabled(model):
            config = SmartSpecConfig(source, num_nodes=8)
            outputs.append(model.generate(**inputs, **GREEDY, assistant=config, return_dict_in_generate=True))
    assert all(torch.equal(output.sequences, texts[:batch_size]) for output in outputs)
    counts = [(output.statistics.drafted_tokens, output.statistics.accepted_tokens) for output in outputs]
    assert counts[0] == counts[1] and counts[0][1] > 0


def test_equal_drafting_time_is_interpolated():
    known = [(0.01, 2.0), (0.03, 3.0)]
    for seconds, tokens in ((0.0, 1.0), (0.005, 1.5), (0.01, 2.0), (0.02, 2.5), (0.03, 3.0), (1.0, 3.0)):
        assert at_equal_time(known, seconds) == pytest.approx(tokens)


def test_blocks_are_compared_with_what_takes_nearest_to_as_long():
    def row(source, form, tokens, seconds, is_block=False):
        counts = GenerationStatistics(steps=10, forwards=10, generated_tokens=tokens, seconds_draft=seconds)
        name = f"{source} {form} {seconds}"
        place = {"part": "blocks", "batch_size": 1, "drafter": name, "tokens_per_second": float(tokens)}
        place |= {"num_different": 0, "num_tied": 0}
        return place | {"source": source, "form": form, "is_block": is_block, "statistics": counts.as_dict()}

    rows = [row("b", "chain", 20, 0.03, True), row("b", "tree", 24, 0.04, True)]
    rows += [row("e", "chain", 15, 0.01), row("e", "chain", 16, 0.028), row("e", "tree", 12, 0.06)]
    lines = _equal_times(rows).rows
    assert [line[0] for line in lines] == ["b chain 0.03; e chain 0.028; batch 1", "b tree 0.04; e tree 0.06; batch 1"]
    assert [line[5] for line in lines] == ["1.25", "2.00"] and lines[0][1:5] == ["3.00", "2.80", "2.00", "1.60"]
    (claim,) = block_claims(rows)
    assert claim.holds and claim.detail == "2.40 / 2.00 = 1.20"
    rows.append(row("b", "tree", 18, 0.04, True) | {"drafter": rows[1]["drafter"], "tokens_per_second": 6.0})
    (claim,) = block_claims(rows)  # of another kind of text
    assert not claim.holds and claim.detail == "2.10 / 2.00 = 1.05"
    (both,) = (row for row in _together(rows) if row["drafter"] == rows[1]["drafter"])
    assert both["tokens_per_second"] == pytest.approx(42 / (24 / 24 + 18 / 6))


def test_kinds_take_turns_in_a_mix():
    data = [DataSet("a", [[1], [2], [3]], [np.empty(0)] * 3), DataSet("b", [[4]], [np.empty(0)])]
    assert mixed(data).prompts == [[1], [4], [2], [3]]
