"""The chunked form with a mask of ancestors, against transformers' recurrent forms along every path."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_smartspec.target_model.recurrent import scan as module
from hf_smartspec.target_model.recurrent.diagonal import levels_of, scan_levels
from hf_smartspec.target_model.recurrent.scan import scan

from ...covering import examples
from ...models import RECURRENT

if RECURRENT:
    from transformers.models.bamba.modeling_bamba import mamba2_selective_state_update
    from transformers.models.falcon_mamba.modeling_falcon_mamba import mamba_selective_state_update
    from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

pytestmark = pytest.mark.skipif(not RECURRENT, reason="this release's layers with states are not known")
HEADS, DK, DV = 2, 4, 3


@st.composite
def trees(draw):
    """Parents of a tree of up to 70 nodes, each before its child; long chains and bushes."""
    reach = draw(st.sampled_from([1, 2, 5, 70]))
    size = draw(st.integers(1, 70))
    return [-1, *[draw(st.integers(max(node - reach, -1), node - 1)) for node in range(1, size)]]


def path_to(parents, node):
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def ancestors(parents):
    sees = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node in range(len(parents)):
        sees[node, path_to(parents, node)] = True
    return sees


def gated_delta(query, key, value, decay, beta, state):
    return torch_recurrent_gated_delta_rule(query, key, value, decay, beta, state, True)


def by_channel(query, key, value, decay, beta, state):
    return recurrent_kimi_delta_attention(query, key, value, decay, beta, state, True)


def state_space(query, key, value, decay, beta, state):
    """With time steps of 1, so that A is the decay; transformers keeps its states the other way round."""
    state, outputs = state.mT.clone(), []
    for token in range(key.shape[1]):
        rate = decay[:, token, :, None, None][0].expand(-1, DV, DK)
        one = torch.ones(1, HEADS, DV)
        outputs.append(mamba2_selective_state_update(state, value[:, token], one, rate, key[:, token], query[:, token]))
    return torch.stack(outputs, dim=1), state.mT


@pytest.mark.parametrize("by_channel", [False, True])
def test_sums_of_decays_are_exact_where_products_need_not_be(by_channel):
    """As with TF32 on GPUs: processors with products in bfloat16 use these for "medium"."""
    generator, size = torch.Generator().manual_seed(0), 64
    key, value = torch.randn(2, 1, HEADS, size, DK, generator=generator)
    decay = -8 * torch.rand(1, HEADS, size, *[DK] * by_channel, generator=generator)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        sees = torch.ones(1, 1, size, size, dtype=torch.bool).tril()
        _, scanned = scan(key, key, value, decay, None, torch.zeros(1, HEADS, DK, DK), sees)
    finally:
        torch.set_float32_matmul_precision(before)
    torch.testing.assert_close(scanned.sums, decay.double().cumsum(2), atol=0, rtol=1e-12)


@pytest.mark.parametrize("by_channel", [False, True])
def test_what_comes_after_large_decays_is_exact(by_channel):
    """Sums of decays are large then, and their differences small."""
    generator, size = torch.Generator().manual_seed(0), 64
    query, key, value = torch.randn(3, 1, HEADS, size, DK, generator=generator)
    decay = -60 * torch.rand(1, HEADS, size, *[DK] * by_channel, generator=generator)
    decay[:, :, -4:] /= 100
    inputs = query, key / key.norm(dim=-1, keepdim=True), value, decay, torch.rand(1, HEADS, size, generator=generator)
    sees, found = torch.ones(1, 1, size, size, dtype=torch.bool).tril(), []
    for dtype in (torch.float32, torch.float64):
        state = torch.zeros(1, HEADS, DK, DK, dtype=dtype)
        output, scanned = scan(*[item.to(dtype) for item in inputs], state, sees)
        found.append((output, scanned.state_at_end(state)))
    for own, expected in zip(*found):
        torch.testing.assert_close(own.double(), expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("most", [1, 2 * 2 * HEADS * 21 * DK])
def test_scores_by_channel_of_groups_of_nodes_are_those_of_all(most, monkeypatch):
    generator, size = torch.Generator().manual_seed(0), 21
    query, key, decay = torch.randn(3, 2, HEADS, size, DK, generator=generator)
    value, beta = torch.randn(2, HEADS, size, DV, generator=generator), torch.rand(2, HEADS, size, generator=generator)
    sees = torch.ones(2, 1, size, size, dtype=torch.bool).tril()
    inputs = query, key, value, -decay.exp(), beta, torch.randn(2, HEADS, DK, DV, generator=generator), sees
    expected, left = scan(*inputs)
    sizes, of_some = [], module._scores_by_channel

    def watched(lefts, keys, last, sums, hidden):
        sizes.append(last.shape[2])
        return of_some(lefts, keys, last, sums, hidden)

    monkeypatch.setattr(module, "_MOST_PAIRS", most)
    monkeypatch.setattr(module, "_scores_by_channel", watched)
    found, other = scan(*inputs)
    assert torch.equal(found, expected) and all(map(torch.equal, left, other))
    assert sizes == ([1] * size if most == 1 else [2] * 10 + [1])


@pytest.mark.parametrize("rule", [gated_delta, by_channel, state_space])
@given(parents=trees(), seed=st.integers(0, 2**31))
@settings(max_examples=examples(12), deadline=None)
def test_every_node_has_the_output_and_the_state_of_its_path(rule, parents, seed):
    size, generator = len(parents), torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(1, size, HEADS, *shape, generator=generator)

    query, key, value = random(DK), random(DK), random(DV)
    key = key / key.norm(dim=-1, keepdim=True)
    decay = -random(DK).exp() / 4 if rule is by_channel else -random().exp() / 4
    beta = None if rule is state_space else random().sigmoid()
    state = torch.randn(1, HEADS, DK, DV, generator=generator)
    scale = 1 if rule is state_space else DK**-0.5
    given_ = [None if item is None else item.transpose(1, 2) for item in (query * scale, key, value, decay, beta)]
    sees = ancestors(parents)
    output, scanned = scan(*given_, state, sees[None, None])
    for node in np.random.default_rng(seed).choice(size, min(size, 3), replace=False).tolist():
        path = path_to(parents, node)
        own = [None if item is None else item[:, path] for item in (query, key, value, decay, beta)]
        expected, final = rule(*own, state)
        torch.testing.assert_close(output[:, :, node], expected[:, -1], atol=1e-5, rtol=1e-5)
        found = scanned.state_after(state, torch.tensor([node]), sees[None, node])
        torch.testing.assert_close(found, final, atol=1e-5, rtol=1e-5)
    first = size // 2
    if first:  # the same by two scans, the second of which knows what the first one has left
        halves = [
            [None if item is None else item[:, :, part] for item in given_]
            for part in (slice(first), slice(first, None))
        ]
        begun, left = scan(*halves[0], state, sees[None, None, :first, :first])
        ended, whole = scan(*halves[1], state, sees[None, None], left)
        torch.testing.assert_close(torch.cat([begun, ended], dim=2), output, atol=1e-5, rtol=1e-5)
        for found, expected in zip(whole, scanned):
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    nothing = scanned.state_after(state, torch.tensor([0]), torch.zeros(1, size, dtype=torch.bool))
    assert torch.equal(nothing, state), "an empty path leaves the state as it is"


@given(many=st.lists(trees(), min_size=1, max_size=3), seed=st.integers(0, 2**31))
@settings(max_examples=examples(12), deadline=None)
def test_levels_of_trees_have_the_outputs_and_states_of_paths(many, seed):
    """Mamba-1, with several trees of different sizes, the first half of which was run before."""
    num, size, channels = len(many), max(map(len, many)), 3
    generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    query, key = torch.randn(2, num, DK, size, generator=generator)
    value, decay = torch.randn(2, num, channels, size, generator=generator)
    steps, rates = decay.exp() / 4, -torch.randn(channels, DK, generator=generator).exp()
    state = torch.randn(num, channels, DK, generator=generator)
    parents = np.full((num, size), -2)
    for number, own in enumerate(many):
        parents[number, : len(own)] = own
    cpu = torch.device("cpu")
    given_ = query, key, value * steps, steps
    output, trail = scan_levels(*given_, rates, state, levels_of(parents, cpu))
    if first := size // 2:
        begun, left = scan_levels(
            *[item[..., :first] for item in given_], rates, state, levels_of(parents[:, :first], cpu)
        )
        ended, whole = scan_levels(*[item[..., first:] for item in given_], rates, state, levels_of(parents, cpu), left)
        assert torch.equal(torch.cat([begun, ended], dim=2), output) and whole.depth == trail.depth
        assert all(torch.equal(*pair) for pair in zip(whole, trail) if isinstance(pair[0], torch.Tensor))
    nodes = [int(rng.integers(-1, len(own))) for own in many]
    path = torch.zeros(num, size, dtype=torch.bool)
    expected = state.clone()
    for number, (own, node) in enumerate(zip(many, nodes)):
        for token in path_to(own, node):
            path[number, token] = True
            x, dt, B, C = [item[number : number + 1, :, token] for item in (value, steps, key, query)]  # noqa: N806
            found = mamba_selective_state_update(expected[number : number + 1], x, dt, rates, B, C)
            torch.testing.assert_close(output[number, :, token], found[0], atol=1e-5, rtol=1e-5)
    found = trail.of(torch.arange(num)).state_after(state, torch.tensor(nodes), path)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    if all(own == list(range(-1, size - 1)) for own in many):
        torch.testing.assert_close(trail.state_at_end(state), trail.state_after(state, None, torch.ones_like(path)))


def test_states_of_trails_are_computed_without_a_wait_for_the_device():
    """Tensors of the meta device have no values that could be read."""
    parents = np.array([[-1, 0, 0, 2], [-1, 0, -2, -2]])
    query, key = torch.empty(2, 2, DK, 4, device="meta")
    value, decay = torch.empty(2, 2, 3, 4, device="meta")
    state, rates = torch.empty(2, 3, DK, device="meta"), torch.empty(3, DK, device="meta")
    _, trail = scan_levels(query, key, value, decay, rates, state, levels_of(parents, torch.device("meta")))
    assert trail.depth == 3
    path = torch.empty(2, 4, dtype=torch.bool, device="meta")
    assert trail.state_after(state, None, path).shape == state.shape
