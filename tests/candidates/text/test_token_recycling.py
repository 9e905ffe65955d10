"""Token Recycling: the matrix, the tree of fixed shape, and the tokens of plain decoding."""

import numpy as np
import pytest
import torch

import hf_smartspec
from hf_smartspec import SmartSpecConfig
from hf_smartspec.candidates import Committed, SourceRequest, TokenRecyclingCandidates
from hf_smartspec.candidates.committed import Likeliest
from hf_smartspec.candidates.text.token_recycling import shape
from hf_smartspec.prepare.sources import resolve

from ...generate.helpers import noisy_copy, prompts, tiny_llama


def verified(lines: dict[int, list[int]], committed) -> Committed:
    """A step that commits tokens, after which the target found eight tokens likely after some others."""
    tokens, following = np.array(list(lines)), np.array(list(lines.values()))
    shares = np.tile(np.arange(8, 0, -1) / 36, (len(lines), 1)).astype(np.float32)
    return Committed(np.array(committed), likeliest=Likeliest(np.full_like(tokens, -1), tokens, following, shares))


def test_the_shape_has_the_published_levels_and_any_first_nodes_are_a_tree():
    """Luo et al., 2024, section 3.2: 80 nodes on six levels; the best ranks come first."""
    depths = [0]
    for place, (above, rank) in enumerate(shape(), start=1):
        assert above < place and 0 <= rank < 8
        depths.append(depths[above] + 1)
    assert np.bincount(depths).tolist() == [1, 8, 21, 25, 15, 8, 3] and len(set(shape())) == 80
    assert [rank for above, rank in shape() if above == 0] == list(range(8))


def test_drafts_follow_the_matrix_as_it_was_last_filled():
    """Section 3: candidates of all verified tokens, also of rejected ones, replace those of before."""
    source = TokenRecyclingCandidates()
    source.begin(SourceRequest("a", np.array([5])))
    assert len(source.propose(["a"], [80])[0]) == 0
    lines = {token: [(token * 8 + rank) % 3000 for rank in range(1, 9)] for token in range(3000)}
    source.observe("a", verified(lines, [7]))
    tree = source.propose(["a"], [80])[0]
    tree.check_integrity(3000)
    known = [above for above, _ in shape()]
    assert tree.tokens[tree.parents < 0].tolist() == lines[7] and len(tree) == len(known) == 80
    for node, (above, rank) in enumerate(shape()):
        parent = 7 if above == 0 else int(tree.tokens[above - 1])
        assert tree.tokens[node] == lines[parent][rank] and tree.parents[node] == above - 1
    assert tree.probs[0] == pytest.approx(8 / 36)
    source.observe("a", verified({7: list(range(10, 18)), 3: [4] * 8}, [9, 7]))
    assert source.propose(["a"], [3])[0].tokens.tolist()[:1] == [10] and len(source.propose(["a"], [3])[0]) == 3


def test_tokens_that_are_not_known_have_no_children_and_namespaces_are_apart():
    source = TokenRecyclingCandidates()
    source.begin(SourceRequest("a", np.array([5]), namespace="mine"))
    source.begin(SourceRequest("b", np.array([5]), namespace="other"))
    source.observe("a", verified({5: [6, 100_000, 8, 9, 10, 11, 12, 13], 6: list(range(20, 28))}, [5]))
    tree, nothing = source.propose(["a", "b"], [80, 80])
    assert {int(tree.tokens[parent]) for parent in tree.parents if parent >= 0} == {6} and len(nothing) == 0
    source.remove_namespace("mine")
    assert not source._matrices and len(source.propose(["a"], [80])[0]) == 0


def test_only_the_namespaces_used_last_are_kept():
    source = TokenRecyclingCandidates()
    for name in [*map(str, range(32)), "0", "32"]:
        source.begin(SourceRequest(name, np.array([5]), namespace=name))
        source.observe(name, verified({5: [6, 7, 8, 9, 10, 11, 12, 13]}, [5]))
    names = ["0", "1", "2", "32"]
    assert [bool(len(tree)) for tree in source.propose(names, [8] * 4)] == [True, False, True, True]
    assert len(source._matrices) == 32


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "seed": 3}])
def test_tokens_are_the_plain_ones_and_the_matrix_outlives_the_call(sampling):
    model = hf_smartspec.enable(tiny_llama())
    arguments = prompts([3, 9]) | sampling | {"max_new_tokens": 24, "eos_token_id": None}
    arguments |= {"return_dict_in_generate": True}
    plain = model.generate(**arguments, assistant="none")
    for _ in range(2):
        found = model.generate(**arguments, assistant=SmartSpecConfig("token_recycling", num_nodes=80))
        assert torch.equal(found.sequences, plain.sequences)
    assert found.statistics.accepted_tokens > 3


@pytest.mark.parametrize("name", ["pld", "suffix_decoding"])
def test_published_sources_by_name_generate_the_plain_tokens(name):
    model = tiny_llama()
    arguments = {"input_ids": torch.tensor([[5, 6, 7, 8, 9] * 5]), "max_new_tokens": 40, "eos_token_id": None}
    with hf_smartspec.enabled(model):
        for _ in range(2):
            found = model.generate(**arguments, assistant=name)
    assert torch.equal(found, model.generate(**arguments))


def test_a_list_that_begins_with_suffix_decoding_is_its_hybrid():
    """SuffixDecoding, section 3: the fallback's draft in place of its own."""
    model = tiny_llama()
    draft, arguments = noisy_copy(model), prompts([3, 9]) | {"max_new_tokens": 24, "eos_token_id": None}
    for name in ("suffix_decoding", "suffix"):
        assert resolve([name, draft], model).source.replaces == (name == "suffix_decoding")
    with hf_smartspec.enabled(model):
        found = model.generate(**arguments, assistant=["suffix_decoding", draft], return_dict_in_generate=True)
    assert found.statistics.accepted_tokens > 5
    assert torch.equal(found.sequences, model.generate(**arguments))


@pytest.mark.parametrize("num_nodes", [0, 81, 1.5])
def test_bad_sizes_are_refused(num_nodes):
    with pytest.raises(ValueError, match="`num_nodes` must be an integer from 1 to 80"):
        TokenRecyclingCandidates(num_nodes)
