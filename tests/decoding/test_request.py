"""A row's text as it grows, and where it ends."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from hf_smartspec.decoding.batch import DecodingBatch
from hf_smartspec.decoding.call import Request

PIECES = st.lists(st.lists(st.integers(0, 9), max_size=40), max_size=12)


def a_request(max_new_tokens: int | None = None) -> Request:
    return Request("a", 0, torch.tensor([0, 3, 4]), torch.tensor([False, True, True]), max_new_tokens)


@given(PIECES, st.none() | st.integers(1, 300))
def test_several_tokens_are_taken_as_one_by_one(pieces, limit):
    """Also where the array that holds the text has to grow; views that were handed out stay as they were."""
    at_once, one_by_one, views = a_request(limit), a_request(limit), []
    for piece in pieces:
        views.append((at_once.generated(0), list(at_once.tokens)))
        at_once.extend(piece)
        for token in piece:
            one_by_one.append(token)
    tokens = [token for piece in pieces for token in piece]
    for request in (at_once, one_by_one):
        assert request.tokens == request.generated(0).tolist() == tokens
        assert request.padded_ids().tolist() == [0, 3, 4, *tokens]
        assert request.text().tolist() == [3, 4, *tokens] and request.length == 2 + len(tokens)
    assert all(view.tolist() == known for view, known in views)


def test_the_array_that_holds_a_text_grows():
    request = a_request(max_new_tokens=2)
    size = len(request._padded)
    request.extend(range(5 * size))
    assert len(request._padded) > size and request.generated(0).tolist() == list(range(5 * size))


@given(PIECES, st.lists(st.integers(0, 9), max_size=12), st.none() | st.integers(1, 30), st.sets(st.integers(0, 9)))
def test_a_row_that_cannot_stop_within_tokens_stops_at_none_of_them(pieces, tokens, limit, eos):
    criteria = StoppingCriteriaList([EosTokenCriteria(torch.tensor(sorted(eos)))] if eos else [])
    if limit is not None:
        criteria.append(MaxLengthCriteria(3 + limit))
    request = a_request(limit)
    batch = DecodingBatch([request], criteria, 0)
    for token in [token for piece in pieces for token in piece][: (limit or 1000) - 1]:
        request.append(token)
        batch.check_stop(request)
    goes_on, was_running = batch.cannot_stop_within(request, tokens), request.stopped_at is None
    for token in tokens:
        request.append(token)
        batch.check_stop(request)
    if goes_on:
        assert request.stopped_at is None and (limit is None or request.num_remaining > 0)
    elif was_running:  # no more is refused than has to be
        assert request.stopped_at is not None
    assert isinstance(request.generated(0), np.ndarray)
