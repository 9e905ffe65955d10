"""Compiled recurrent layers of ragged rows with trees, against torch's form of them and plain loops."""

import itertools
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_smartspec.cpu.recurrence import ShortTails, can_convolve, can_recur, has_recurrence
from hf_smartspec.target_model.recurrent.scan import normalized, rates_of, scan

from ..covering import examples

pytestmark = pytest.mark.skipif(not has_recurrence(), reason="no compiled code for this CPU")
KEY, EPS = (3, 0), 1e-3


@st.composite
def rows_of_trees(draw):
    """
    For up to three rows: parents, the token after which the state is stored, and whether it is stored at once, which
    only rows without branches are.
    """
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        size, reach = draw(st.integers(1, 14)), draw(st.sampled_from([1, 3, 14]))
        parents = [-1, *[draw(st.integers(max(node - reach, -1), node - 1)) for node in range(1, size)]]
        is_stored = parents == list(range(-1, size - 1)) and draw(st.booleans())
        rows.append((parents, size - 1 if is_stored else draw(st.integers(-1, size - 1)), is_stored))
    return rows


def tails_of(rows):
    table = np.array([[0, len(parents), 2 * number + 1, end if at_once else -1] for number, (parents, end, at_once) in
                      enumerate(rows)])  # fmt: skip
    table[:, 0] = np.cumsum(table[:, 1]) - table[:, 1]
    padded = np.full((len(rows), table[:, 1].max()), -2)
    for own, (parents, *_) in zip(padded, rows):
        own[: len(parents)] = parents
    return ShortTails(table, padded), table


def path_to(parents, node):
    return [*path_to(parents, parents[node]), node] if node >= 0 else []


def store(tails, rows, windows, states):
    numbers = np.array([number for number, (_, end, _) in enumerate(rows) if end >= 0], np.int64)
    tails.store(numbers, np.array([rows[number][1] for number in numbers], np.int64), windows, states)


@pytest.mark.parametrize(
    ("groups", "with_beta", "eps", "with_rates", "dtype"),
    [
        (1, True, EPS, True, torch.float32),
        (1, True, EPS, True, torch.bfloat16),
        (2, True, 0.0, False, torch.float32),
        (4, False, 0.0, False, torch.float32),
    ],
)
@given(rows=rows_of_trees(), sizes=st.sampled_from([(16, 16), (32, 16), (16, 48)]), seed=st.integers(0, 2**31))
@settings(max_examples=examples(15), deadline=None)
def test_recurrences_are_those_of_torch(groups, with_beta, eps, with_rates, dtype, rows, sizes, seed):
    """Decays, factors and rates may be in bfloat16."""
    (tails, table), (dk, dv), heads = tails_of(rows), sizes, 4
    generator, num = torch.Generator().manual_seed(seed), int(table[:, 1].sum())
    # Queries, keys and values lie beside one another, as in the output of a convolution.
    both = heads // groups * dk
    mixed = torch.randn(num, 2 * both + heads * dv, generator=generator)
    query, key = (item.view(num, -1, dk) for item in mixed[:, : 2 * both].split(both, dim=1))
    value = mixed[:, 2 * both :].view(num, heads, dv)
    if not eps:
        key = key / dk
    decay = -2 * torch.rand(num, heads, generator=generator).to(dtype)
    beta = torch.rand(num, heads, generator=generator).to(dtype) if with_beta else None
    states = torch.randn(2 * len(rows) + 1, heads, dk, dv, generator=generator)
    before = states.clone()
    rates = None
    if with_rates:  # softplus is the number itself from 20 on
        rates = -3 - torch.rand(heads, generator=generator).to(dtype), torch.tensor([-1.0, 0.0, 5.0, 21.0], dtype=dtype)
        beta = 4 * beta - 2
    assert can_recur(query, key, value, decay, beta, rates)
    found = tails.recur(KEY, query, key, value, decay, beta, states, 0.7, eps, rates)
    if rates is not None:
        decay, beta = rates_of(decay, rates), beta.float().sigmoid()
    store(tails, rows, {}, {KEY: states})
    for (begin, size, entry, _), (parents, end, _) in zip(table, rows):
        own = slice(begin, begin + size)
        sees = torch.zeros(size, size, dtype=torch.bool)
        for node in range(size):
            sees[node, path_to(parents, node)] = True
        pair = [normalized(item[own], eps).repeat_interleave(groups, dim=1) for item in (query, key)]
        given_ = 0.7 * pair[0], pair[1], value[own], decay[own], None if beta is None else beta[own]
        parts = [None if item is None else item[None].transpose(1, 2) for item in given_]
        outputs, scanned = scan(*parts, state=before[entry][None], sees=sees[None, None])
        torch.testing.assert_close(found[own], outputs[0].transpose(0, 1), atol=2e-5, rtol=2e-5)
        path = sees[end] if end >= 0 else torch.zeros(size, dtype=torch.bool)
        expected = scanned.state_after(before[entry][None], torch.tensor([max(end, 0)]), path[None])
        torch.testing.assert_close(states[entry], expected[0], atol=2e-5, rtol=2e-5)
    assert torch.equal(states[::2], before[::2]), "other entries stay"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("width", "with_bias", "is_silu"), [(2, True, False), (3, False, True), (4, True, True), (7, True, False)]
)
@given(rows=rows_of_trees(), channels=st.sampled_from([1, 17, 600]), seed=st.integers(0, 2**31))
@settings(max_examples=examples(15), deadline=None)
def test_convolutions_read_the_nearest_ancestors(width, with_bias, is_silu, dtype, rows, channels, seed):
    tails, table = tails_of(rows)
    generator, num = torch.Generator().manual_seed(seed), int(table[:, 1].sum())
    shapes = (num, channels + 3), (channels, width), (channels,), (2 * len(rows) + 1, width - 1, channels)
    inputs, weight, bias, windows = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    inputs = inputs[:, 2:-1]
    before, bias = windows.clone(), bias if with_bias else None
    assert can_convolve(inputs, weight, bias)
    found = tails.convolve(KEY, inputs, windows, weight, bias, is_silu)
    store(tails, rows, {KEY: windows}, {})
    for (begin, _, entry, _), (parents, end, _) in zip(table, rows):
        for node in range(len(parents)):
            read = torch.cat([before[entry], inputs[[begin + item for item in path_to(parents, node)]]])[-width:]
            expected = (read.float() * weight.T.float()).sum(0) + (0 if bias is None else bias.float())
            expected = torch.nn.functional.silu(expected) if is_silu else expected
            torch.testing.assert_close(found[begin + node], expected, atol=1e-5, rtol=1e-5)
        path = [begin + item for item in path_to(parents, end)]
        assert torch.equal(windows[entry], torch.cat([before[entry], inputs[path]])[1 - width :])
    assert torch.equal(windows[::2], before[::2]), "other entries stay"


def test_other_numbers_are_left_to_torch():
    x, rates, weight = torch.zeros(2, 1, 16), torch.zeros(2, 1), torch.zeros(16, 4)
    assert can_recur(x, x, x, rates, None) and can_convolve(x[:, 0], weight, None)
    assert not can_recur(x[..., :8], x[..., :8], x, rates, None), "not whole vectors"
    assert not can_recur(x, x, x, x, None), "a decay for each channel"
    assert not can_recur(x, x, x, rates.bfloat16(), None), "decays in bfloat16 that are not computed from rates"
    others = torch.zeros(1), torch.zeros(1, dtype=torch.bfloat16)
    assert not can_recur(x, x, x, rates, None, others), "rates of several kinds"
    assert not can_convolve(x[:, 0].half(), weight, None) and not can_convolve(x[:, 0], torch.zeros(16, 17), None)
    assert not can_convolve(x[:, 0].clone().requires_grad_(), weight, None)


def test_queries_are_not_held_for_states():
    """Only outputs need them. States that are stored later are those that are stored at once."""
    generator, parents, found = torch.Generator().manual_seed(0), [-1, 0, 1], []
    key, value = torch.randn(2, 3, 1, 16, generator=generator)
    decay, beta = -torch.rand(3, 1, generator=generator), torch.rand(3, 1, generator=generator)
    for at_once in (False, True):
        rows = [(parents, 2, at_once)]
        (tails, _), states, query = tails_of(rows), torch.zeros(2, 1, 16, 16), torch.ones(3, 1, 16)
        tails.recur(KEY, query, key, value, decay, beta, states, eps=EPS)
        freed = weakref.ref(query)
        del query
        assert freed() is None
        store(tails, rows, {}, {KEY: states})
        found.append(states)
    assert found[0].any() and torch.equal(*found)


@pytest.mark.parametrize("sizes", [(16, 16), (16, 80), (32, 128)])
@pytest.mark.parametrize("is_delta", [True, False])
@given(tree=rows_of_trees(), cuts=st.sets(st.integers(1, 29)), at_once=st.booleans(), seed=st.integers(0, 2**31))
@settings(max_examples=examples(15), deadline=None)
def test_cuts_and_branches_change_no_bit(sizes, is_delta, tree, cuts, at_once, seed):
    """A text of 30 tokens is run whole, in pieces, and as a path of a tree with others beside it."""
    (dk, dv), generator, num = sizes, torch.Generator().manual_seed(seed), 30
    query, key, value = (torch.randn(num, 2, size, generator=generator) for size in (dk, dk, dv))
    decay, beta = -torch.rand(num, 2, generator=generator), torch.rand(num, 2, generator=generator)
    given_ = query, key, value, decay, beta if is_delta else None
    first = torch.randn(3, 2, dk, dv, generator=generator)

    def run(tokens, parents, end, states, at_once):
        tails, _ = tails_of([(parents, end, at_once)])
        own = [item if item is None else item[tokens] for item in given_]
        found = tails.recur(KEY, *own, states, 0.7, EPS if is_delta else 0.0)
        store(tails, [(parents, end, at_once)], {}, {KEY: states})
        return found

    whole, pieces = first.clone(), first.clone()
    expected = run(list(range(num)), list(range(-1, num - 1)), num - 1, whole, True)
    bounds, found = [0, *sorted(cuts), num], []
    for begin, after in itertools.pairwise(bounds):
        chain = list(range(-1, after - begin - 1))
        found.append(run(list(range(begin, after)), chain, len(chain) - 1, pieces, at_once))
    assert torch.equal(torch.cat(found), expected) and torch.equal(pieces, whole)

    parents, end, _ = tree[0]  # its tokens are those of the text at their depth
    path, states, short = path_to(parents, end), first.clone(), first.clone()
    depths = [len(path_to(parents, node)) - 1 for node in range(len(parents))]
    outputs = run(depths, parents, end, states, False)
    assert torch.equal(outputs, expected[depths])
    if path:
        run(list(range(len(path))), list(range(-1, len(path) - 1)), len(path) - 1, short, True)
    assert torch.equal(states, short)


@pytest.mark.parametrize("default", [{"dtype": torch.bfloat16}, {"device": "meta"}])
def test_torchs_defaults_do_not_matter_for_the_check_nor_does_it_draw_numbers(default):
    before = torch.get_rng_state()
    has_recurrence.cache_clear()
    try:
        torch.set_default_dtype(default.get("dtype", torch.float32))
        torch.set_default_device(default.get("device"))
        assert has_recurrence()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        has_recurrence.cache_clear()
    assert torch.equal(torch.get_rng_state(), before)
