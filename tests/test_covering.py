"""Of a product of parametrisations, what `make test` leaves out."""

from itertools import combinations, product

import pytest

from .covering import covering, part_of


@pytest.mark.parametrize("sizes", [(3, 4, 5), (2, 2, 2, 4), (8, 3, 1, 2)], ids=str)
def test_any_two_values_meet_in_few_cases(sizes):
    cases = list(product(*map(range, sizes)))
    run = [cases[place] for place in covering(cases)]
    for one, other in combinations(range(len(sizes)), 2):
        met = {(case[one], case[other]) for case in run}
        assert met == set(product(range(sizes[one]), range(sizes[other])))
    assert len(run) < 0.6 * len(cases) and run == sorted(run)


def test_of_two_parametrisations_every_value_is_there_once():
    cases = list(product("abcdef", range(5)))
    run = [cases[place] for place in covering(cases)]
    assert {value for case in run for value in case} == {*"abcdef", *range(5)}
    assert len(run) == 6


@pytest.mark.parametrize("cases", [[("a",), ("b",), ("c",)], [()], [("x", "y"), ("x", "z")], [("x", "y")] * 9])
def test_single_parametrisations_are_run_whole(cases):
    assert covering(cases) == list(range(len(cases)))


def test_what_is_left_out_of_a_part_is_exhaustive():
    first, second, third = part_of([("a", 1), ("b", 2), "c"], ("b", 2))
    assert second == ("b", 2)
    assert (first.values, third.values) == (("a", 1), ("c",))
    assert all([mark.name for mark in case.marks] == ["exhaustive"] for case in (first, third))
