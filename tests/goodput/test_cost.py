"""The cost of a forward: fits, corrections, drafting, and the free budget."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from hf_smartspec.goodput import CostModel, CostPoint, DraftCost, DraftTimer, Roofline, free_tokens
from hf_smartspec.goodput.cost import UNKNOWN
from hf_smartspec.goodput.cost_fit import nonnegative_least_squares

from .simulation import line


def points_of(cost, noise=0.0, seed=0):
    rng = np.random.default_rng(seed)
    settings = [(rows, context, width) for rows in (1, 4, 16) for context in (64, 700) for width in (1, 2, 4, 8)]
    result = []
    for rows, context, width in settings:
        seconds = float(cost.seconds(rows * context, rows * width, width)) * rng.lognormal(0, noise)
        result.append(CostPoint(rows * context, rows * width, width, seconds))
    return result


def test_a_line_is_recovered_from_noisy_measurements():
    true = CostModel(alpha=2e-6, gamma=0.7e-3, delta=20e-3, beta=4e-7)
    exact, noisy = CostModel.fit(points_of(true)), CostModel.fit(points_of(true, noise=0.03))
    for name in ("alpha", "beta", "gamma", "delta"):
        assert getattr(exact, name) == pytest.approx(getattr(true, name), rel=1e-6)
        assert getattr(noisy, name) == pytest.approx(getattr(true, name), rel=0.3)
    assert not exact.knots and exact.median_error(points_of(true)) < 1e-9
    assert noisy.median_error(points_of(true)) < 0.03


def test_a_knee_gets_a_curve_that_never_falls():
    knee = CostModel(2e-6, 0, 0, knots=(1, 16, 32, 128), curve=(0.01, 0.01, 0.03, 0.15))
    fitted = CostModel.fit(points_of(knee, noise=0.01))
    assert fitted.knots and fitted.median_error(points_of(knee)) < 0.03
    sizes = np.arange(1, 200)
    assert (np.diff(fitted.seconds(0, sizes)) >= -1e-12).all()
    assert fitted.seconds(0, 256) > fitted.seconds(0, 128), "beyond the last knot it goes on rising"


def test_too_few_measurements_are_refused():
    with pytest.raises(ValueError, match="at least 4"):
        CostModel.fit(points_of(line())[:3])
    with pytest.raises(ValueError, match="positive seconds"):
        CostModel.fit([CostPoint(1, 1, 1, 0.0)] * 5)


@pytest.mark.parametrize(
    ("numbers", "name"),
    [
        ({"alpha": -1.0}, "alpha"),
        ({"gamma": float("nan")}, "gamma"),
        ({"knots": (1.0, 2.0)}, "knots"),
        ({"knots": (2.0, 1.0), "curve": (1.0, 1.0)}, "knots"),
        ({"knots": (1.0, 2.0), "curve": (2.0, 1.0)}, "curve"),
    ],
)
def test_impossible_costs_are_refused(numbers, name):
    with pytest.raises(ValueError, match=name):
        CostModel(**({"alpha": 0.0, "gamma": 1.0, "delta": 1.0} | numbers))


def test_seconds_broadcast():
    cost = CostModel(1.0, 10.0, 100.0, beta=0.5)
    assert cost.seconds(2, 3, 4) == 2 * (1 + 0.5 * 4) + 30 + 100
    assert cost.seconds(2, np.arange(3), np.array([[1], [2]])).shape == (2, 3)


def test_as_dict_and_back():
    for cost in (line(), CostModel(1e-6, 0, 0, knots=(1, 2), curve=(0.1, 0.2), is_provisional=True)):
        cost.observe(100, 1, 5.0)
        again = CostModel.from_dict(json.loads(json.dumps(cost.as_dict())))
        assert again == cost and again.correction(1) == 1.0, "what was learnt while serving is not kept"
    for wrong in ({}, {"alpha": 1.0, "gamma": 1.0, "delta": 1.0, "speed": 3.0}):
        with pytest.raises(ValueError, match="Not a cost model"):
            CostModel.from_dict(wrong)


SIZES = (1, 2, 4, 8, 16, 64)


@given(st.floats(0.03, 30.0), st.sampled_from(SIZES), st.integers(0, 2**32 - 1))
def test_the_first_steps_tell_how_fast_the_machine_is_as_a_whole(factor, size, seed):
    """Whatever their size: forwards of another keep their price by those."""
    cost, rng = line(), np.random.default_rng(seed)
    true = line().seconds(200, np.array(SIZES)) * factor
    for _ in range(5):
        cost.observe(200, size, float(true[SIZES.index(size)]) * rng.lognormal(0, 0.03))
    assert cost.seconds(200, np.array(SIZES)) == pytest.approx(true, rel=0.25)


def test_a_first_step_that_took_long_is_soon_forgotten():
    cost = line()
    cost.observe(200, 4, 5.0)  # something was compiled
    for _ in range(8):
        cost.observe(200, 4, float(line().seconds(200, 4)))
    assert cost.correction(4) < 1.3


def test_a_step_that_took_long_leaves_its_size_in_doubt():
    """Else a size that seems to be dear would not be tried again, and a pause of the process would last for ever."""
    cost = line()
    observe(cost, line(), [4], 20)
    true = float(line().seconds(200, 16))
    cost.observe(200, 16, 4 * true)
    assert cost.seconds(200, 16) < 3 * true and cost.doubt(16, 4) > 1.5 * UNKNOWN
    cost.observe(200, 16, true)
    assert cost.seconds(200, 16) == pytest.approx(true, rel=0.2)


def test_a_size_that_has_become_slower_than_others_is_told_from_these():
    cost = line()
    before = cost.seconds(200, np.array(SIZES))
    for _ in range(60):
        for size, seconds in zip(SIZES, before):
            cost.observe(200, size, float(seconds) * (2.0 if size == 16 else 1.0))
    after = cost.seconds(200, np.array(SIZES)) / before
    assert after == pytest.approx(np.where(np.array(SIZES) == 16, 2.0, 1.0), rel=0.1)


def test_what_is_known_of_a_size_by_another_grows_with_steps_and_fades():
    cost = line()
    before = cost.doubt(8, 1)
    assert cost.doubt(8, 8) == 0.0 and cost.doubt(1, 8) == pytest.approx(before) and before > cost.doubt(2, 1) > 0.1
    observe(cost, line(), [1], 20)
    assert 0.5 * before < cost.doubt(8, 1) <= before, "one of two teaches little"
    observe(cost, line(), [1, 8], 40)
    known = cost.doubt(8, 1)
    assert known < 0.5 * before
    observe(cost, line(), [1], 2000)
    assert cost.doubt(8, 1) > 2 * known


def test_sizes_that_are_never_seen_are_not_less_known_than_at_the_beginning():
    """However long an engine runs: else they would seem to be free in doubt."""
    cost = line()
    before = cost.doubt(64, 1)
    for _ in range(20_000):
        cost.observe(200, 1, float(line().seconds(200, 1)))
    assert 0.5 * before < cost.doubt(64, 1) <= before


def test_lowered_costs_do_not_fall_with_the_size():
    cost = line()
    observe(cost, line(), [1, 8], 100)
    seconds, factors = cost.by_tokens(1, 200)
    lowered = 2.0 * cost.doubt(np.arange(1, 201), 8)
    same, hopeful = cost.by_tokens(1, 200, lowered)
    assert (same == seconds).all() and hopeful[7] == pytest.approx(factors[7])
    assert (np.diff(same * hopeful) > -1e-9).all()
    assert hopeful[199] / factors[199] < hopeful[15] / factors[15] < 1.0


def test_a_size_in_doubt_costs_no_more_than_a_larger_one_and_no_less_than_a_smaller_one():
    """A profile takes 4 and 8 tokens to be dear, and 64 to be cheap."""
    knots = (1, 2, 4, 8, 16, 32, 64)
    cost = CostModel(0, 0, 0, knots=knots, curve=(0.01, 0.01, 0.03, 0.06, 0.06, 0.06, 0.06))
    for _ in range(2):
        cost.observe(200, 16, 0.02)
    four, eight, sixteen, many = cost.seconds(200, np.array([4, 8, 16, 64]))
    assert four <= eight == pytest.approx(sixteen) and many >= sixteen
    for _ in range(40):
        cost.observe(200, 8, 0.03)
        cost.observe(200, 16, 0.02)
    assert cost.seconds(200, 8) > 1.2 * cost.seconds(200, 16), "what was measured counts"


def test_steps_are_faster_than_predicted_for_no_reason_but_the_prediction():
    """Those that are much slower may have been disturbed."""
    faster, slower = line(), line()
    for cost, factor in ((faster, 0.3), (slower, 1 / 0.3)):
        observe(cost, line(), [1, 8], 40)
        cost.observe(200, 8, factor * float(line().seconds(200, 8)))
    assert -np.log(faster.correction(8)) > 2 * np.log(slower.correction(8)) > 0


def test_a_slower_machine_shows_at_all_sizes_in_the_end():
    cost = line()
    for _ in range(4000):
        cost.observe(200, 16, 2.0 * float(line().seconds(200, 16)))
    assert cost.correction(1) > 1.8


def test_one_hiccup_changes_little():
    cost = line()
    for _ in range(30):
        cost.observe(200, 4, float(line().seconds(200, 4)))
    cost.observe(200, 4, 50.0)
    assert cost.correction(4) < 1.1
    for nonsense in (0.0, -1.0, float("nan"), float("inf")):
        cost.observe(200, 4, nonsense)
    assert cost.correction(4) < 1.1


def observe(cost, true, sizes, num, noise=0.1, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(num):
        size = int(rng.choice(sizes))
        cost.observe(200, size, float(true.seconds(200, size)) * rng.lognormal(0, noise))


def test_a_profile_that_is_wrong_about_some_sizes_only_is_found_wrong():
    """It was measured while the machine was busy, now and then."""
    cost, true = CostModel(0, 0, 0, knots=(1, 2, 4), curve=(0.01, 0.019, 0.02)), CostModel(0, 0, 0.01)
    observe(cost, true, [1], 300)
    assert not cost.is_wrong, "nothing is known of other sizes"
    observe(cost, true, [3], 10)
    assert not cost.is_wrong, "once is never"
    observe(cost, true, [1, 3], 100)
    assert cost.is_wrong


def test_a_profile_is_not_refuted_while_the_machine_does_other_things():
    """Of which some sizes suffer more than others."""
    quiet = line()
    for noise, is_wrong in ((0.4, False), (0.05, True)):
        cost = line()
        observe(cost, CostModel(2e-6, 6e-3, 10e-3), [1, 2, 5, 9, 17], 600, noise)
        assert cost.is_wrong == is_wrong
    observe(quiet, line(), [1, 2, 5, 9, 17], 600, noise=0.4)
    assert not quiet.is_wrong


@pytest.mark.parametrize("factor", [0.1, 0.3, 1.0, 4.0])
def test_a_profile_is_wrong_as_a_whole_only_if_it_is_too_high(factor):
    """Other work makes forwards slower: at the time of the measurement, or now."""
    cost = line()
    observe(cost, CostModel(2e-6 * factor, 0.7e-3 * factor, 20e-3 * factor), [1, 2, 5, 9, 17], 600)
    cost.observe(200, 5, 50.0)
    assert cost.is_wrong == (factor < 1) and cost.correction(4) == pytest.approx(factor, rel=0.25)


CURVE = CostModel(2e-7, 0, 0, 1e-8, (1, 2, 4, 8, 16, 48), (0.017, 0.0172, 0.0177, 0.0184, 0.021, 0.03))


@pytest.mark.parametrize("true", [line(), CURVE])
@pytest.mark.parametrize("wrong", [line(0.7e-2, 200e-3, 2e-5), line(5e-3, 10e-3), CURVE])
def test_a_mended_profile_holds_what_steps_have_shown(wrong, true):
    sizes = np.array([1, 2, 5, 9, 17])
    cost = CostModel.from_dict(wrong.as_dict())
    observe(cost, true, sizes, 600)
    mended = cost.mended()
    assert mended.seconds(200, sizes) == pytest.approx(true.seconds(200, sizes), rel=0.1)
    assert not mended.is_wrong and mended.correction(4) == 1.0
    assert mended.seconds(0, 4000) > mended.seconds(0, 100), "sizes that no step had have costs too"


def test_a_mended_profile_never_falls_with_the_size():
    cost = line()
    observe(cost, CostModel(0, 0, 0, knots=(1, 2, 3), curve=(0.05, 0.05, 0.05)), [1], 100)
    observe(cost, line(), [32], 100)
    assert cost.seconds(200, 1) > cost.seconds(200, 32)
    assert (np.diff(cost.mended().seconds(200, np.arange(1, 200))) >= 0).all()


def test_a_profile_that_no_step_has_corrected_is_mended_into_itself():
    for cost in (line(), CURVE):
        sizes = np.arange(1, 100)
        assert cost.mended().seconds(200, sizes, 3) == pytest.approx(cost.seconds(200, sizes, 3))


@given(st.integers(0, 2**32 - 1), st.booleans())
def test_least_squares_against_scipy(seed, is_positive):
    rng = np.random.default_rng(seed)
    matrix = rng.normal(size=(rng.integers(3, 20), rng.integers(1, 8))) * 10.0 ** rng.integers(-6, 3)
    target = rng.normal(size=len(matrix))
    if is_positive:
        matrix, target = np.abs(matrix), np.abs(target)
    found = nonnegative_least_squares(matrix, target)
    assert (found >= 0).all()
    assert np.linalg.norm(matrix @ found - target) <= nnls(matrix, target)[1] * (1 + 1e-6) + 1e-9


# --- Drafting ---------------------------------------------------------------------------------------------------------


def test_an_autoregressive_draft_costs_by_the_level():
    model, other = DraftCost(2.0, 0.5, is_autoregressive=True), DraftCost(2.0, 0.5)
    for cost, levels, expected in (
        (model, [3, 1, 0], (3, 4)),  # Eq. 5: three calls, of two rows, one and one
        (other, [3, 1, 0], (1, 2)),
        (model, [0, 0], (0, 0)),
        (other, [0, 0], (0, 0)),
        (model, [], (0, 0)),
    ):
        assert cost.calls(np.array(levels, int)) == expected


def test_a_draft_models_cost_from_its_profile():
    cost = DraftCost.of_model(CostModel(alpha=1e-6, gamma=1e-3, delta=5e-3), mean_context=500)
    assert cost.is_autoregressive
    assert cost.per_row == pytest.approx(1e-3 + 5e-4) and cost.per_call == pytest.approx(5e-3)


def test_draft_seconds_are_learnt():
    rng, timer = np.random.default_rng(0), DraftTimer()
    assert timer.seconds(DraftCost(0.3, 0.1)) == (0.3, 0.1), "nothing else is known yet"
    for _ in range(300):
        calls = rng.integers(1, 6)
        rows = calls * rng.integers(1, 9)
        timer.observe(calls, rows, (2e-3 * calls + 3e-4 * rows) * rng.lognormal(0, 0.05))
    per_call, per_row = timer.seconds(DraftCost())
    assert per_call == pytest.approx(2e-3, rel=0.1) and per_row == pytest.approx(3e-4, rel=0.2)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40), st.floats(0, 1)), max_size=20))
def test_learnt_draft_seconds_are_never_negative(drafts):
    timer = DraftTimer()
    for draft in drafts:
        timer.observe(*draft)
    assert min(timer.seconds(DraftCost())) >= 0


# --- The free budget --------------------------------------------------------------------------------------------------


def test_the_free_budget_of_the_papers_example():
    # SSSD, section 3.2.1: Llama-2 7B on an Ascend 910B4, "almost free until about 435".
    assert Roofline(280e12, 0.8e12).free_tokens(hidden_size=4096) == pytest.approx(435, rel=0.05)
    assert Roofline(280e12, 0.08e12).free_tokens(hidden_size=4096) == float("inf")


def test_the_free_budget_of_a_profile():
    cost = CostModel(0, 1e-3, 19e-3)
    assert free_tokens(cost, slack=0.1) == 3 and free_tokens(cost, slack=0) == 1
    assert free_tokens(CostModel(1e-6, 0, 1e-2)) == 2**16, "nothing ends it"
    knee = CostModel(0, 0, 0, knots=(1, 32, 64), curve=(0.01, 0.01, 0.02))
    assert free_tokens(knee, slack=0) == 32
    roofline = Roofline.of_profile(knee, num_parameters=10**9, bytes_per_parameter=2)
    assert roofline.bandwidth == pytest.approx(2e9 / 0.01) and roofline.flops == pytest.approx(2e9 / (0.01 / 32))
    with pytest.raises(ValueError, match="slack"):
        free_tokens(cost, slack=-1)


def test_single_sizes_cost_what_they_cost_among_others():
    cost = CostModel(1e-6, 0.0, 0.0, 1e-7, knots=(1, 2, 8, 64), curve=(0.01, 0.013, 0.014, 0.03))
    for batched in (1, 2, 9, 40):
        cost.observe(100, batched, 0.02)
    sizes = np.array([1, 2, 5, 8, 31, 64, 100, 3000])
    for host in (0.0, 0.02):
        cost.host = host
        among = cost.seconds(100, sizes, 3)
        alone = [cost.seconds(100, size, 3) for size in sizes.tolist()]
        assert alone == pytest.approx(among, rel=1e-14)


@pytest.mark.parametrize("factor", [3, 10, 30])
def test_a_slow_first_step_leaves_a_right_profile_as_it_is(factor):
    """All sizes cost the same here, as on a GPU that reads its weights."""
    cost = CostModel(0, 0, 0.01, 0)
    cost.observe(100, 8, factor * 0.01)
    for _ in range(50):
        cost.observe(100, 8, 0.01)
    assert all(cost.seconds(100, size) == pytest.approx(0.01, rel=0.035) for size in (1, 8, 16, 64, 1024))
