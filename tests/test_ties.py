"""The judge of differences must not take a fault for a tie, nor a tie for a fault."""

from dataclasses import replace

import pytest
import torch

from .cases import Setting, settings
from .models import new_model
from .ties import first_difference

PROMPTS = ((5, 9, 5, 9, 5), (11,), (3, 4, 5, 6, 7, 8))


@pytest.fixture
def model(monkeypatch):
    model = new_model("llama")
    monkeypatch.setattr("tests.cases.shared_model", lambda *args, **kwargs: model)
    return model


def a_setting(sampling: dict | None = None) -> Setting:
    given = next(settings("llama", sampling is not None, 1))
    return replace(
        given, prompts=PROMPTS, limit={"max_new_tokens": 6}, eos=None, extras={}, sampling=sampling, name="tested"
    )


def expected_row(setting: Setting, row: int) -> list[int]:
    return setting.reference()[row, max(map(len, PROMPTS)) :].tolist()


def changed(tokens: list[int], position: int, token: int) -> list[int]:
    return [*tokens[:position], token, *tokens[position + 1 :]]


@pytest.mark.parametrize("sampling", [None, {"temperature": 0.7}])
@pytest.mark.parametrize("position", [0, 4])
def test_another_token_is_a_fault(model, sampling, position):
    setting = a_setting(sampling)
    expected = expected_row(setting, 0)
    difference = first_difference("a case", setting, 0, expected, changed(expected, position, 50))
    assert difference.tie is None and difference.gap > 0.01
    assert (difference.position, difference.expected, difference.actual) == (position, expected[position], 50)
    assert "FAULT in a case, row 0" in str(difference)


@pytest.mark.parametrize("position", [0, 4])
def test_a_token_of_equal_score_is_a_tie(model, position):
    setting = a_setting()
    expected = expected_row(setting, 2)
    token = expected[position]
    model.lm_head.weight[50] = model.lm_head.weight[token] * (1 + 1e-9)
    difference = first_difference("a case", setting, 2, expected, changed(expected, position, 50))
    assert difference.tie == "scores" and difference.gap < 1e-6


def test_a_token_on_the_edge_of_a_filter_is_a_tie(model):
    """Only one token is left, and which of two it is depends on rounding; the other is ruled out."""
    setting = a_setting({"top_k": 1})
    expected = expected_row(setting, 1)
    row = model.lm_head.weight[expected[2]]
    model.lm_head.weight[50] = row + 1e-7 * torch.randn(row.shape, generator=torch.Generator().manual_seed(0))
    difference = first_difference("a case", setting, 1, expected, changed(expected, 2, 50))
    assert difference.tie == "filter or routing" and difference.gap == float("inf")


def test_what_plain_decoding_got_wrong_is_no_tie(model):
    """The token of ours is right, and that of plain decoding is not: rounding does not explain it either."""
    setting = a_setting()
    actual = expected_row(setting, 0)
    difference = first_difference("a case", setting, 0, changed(actual, 3, 50), actual)
    assert difference.tie is None


@pytest.mark.parametrize(("length", "other"), [(3, 6), (6, 3)])
def test_a_row_that_ends_elsewhere_is_a_fault(model, length, other):
    setting = a_setting()
    tokens = expected_row(setting, 0)
    difference = first_difference("a case", setting, 0, tokens[:length], tokens[:other])
    assert difference.tie is None and difference.position == 3
