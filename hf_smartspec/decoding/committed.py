"""Steps for sources and recorders that need more than tokens: the target's hidden states and scores."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..candidates.base import TreeCandidateGenerator, check_needs, refuse_needs
from ..candidates.committed import HIDDEN_STATES, Committed
from ..target_model.forward.hidden_states import FedStates, select
from ..target_model.layout.rows import RowInput
from .call import ModelForward, Request
from .learning import Recorder, Shown, guarded


def check_source(source: TreeCandidateGenerator, forward: ModelForward) -> None:
    """Raise `ValueError` if a source needs states or scores that this forward does not leave."""
    check_needs(source)
    if forward.taps is None:
        refuse_needs(source, type(forward).__name__)
    elif HIDDEN_STATES in source.needs:
        try:
            forward.taps.check(source.hidden_layers)
        except ValueError as error:
            raise ValueError(
                f"{type(source).__name__} needs hidden states of layers {list(source.hidden_layers)}, and {error}. "
                "Pass another `assistant`."
            ) from error


def run_forward(forward: ModelForward, rows: Sequence[Request], inputs: Sequence[RowInput]) -> tuple[Any, list[int]]:
    """
    Run a forward of the rows' inputs, and add hidden states to the rows whose sources need them, until these get them.
    """
    asking = [request for request in rows if request.chain.hidden_layers and request.wants_states]
    if not asking or forward.taps is None:
        return forward.forward(inputs)
    layers = frozenset[int]().union(*[request.chain.hidden_layers for request in asking])
    with forward.taps.taking(layers) as states:
        output = forward.forward(inputs)
    for request in asking:
        newest = states.get(request.cache_row)
        # Without the newest states, earlier ones are of no use: sources that are shown none are dropped.
        request.fed = newest if request.fed is None or newest is None else request.fed.continued(newest)
    return output


def show_steps(
    rows: Sequence[Request], tokens: Mapping[Request, np.ndarray], show: Callable[[Request, Committed], None]
) -> None:
    """
    Send each row's committed tokens, hidden states and scores to `show`, for its sources, and to its recorders.

    Args:
        rows (sequence of `Request`): Rows whose draft was verified, or of whose prompt a part was run.
        tokens (mapping of `Request` to `np.ndarray`): Tokens that were committed since rows were shown last, if any.
        show (`Callable`): Passes a step to the sources of a request.
    """
    steps = _committed_steps(rows, tokens)
    for request, step in steps.items():
        show(request, step)
    _show_recorders(steps)
    for request in rows:
        request.fed = None


def _committed_steps(rows: Sequence[Request], tokens: Mapping[Request, np.ndarray]) -> dict[Request, Committed]:
    fed = [request for request in rows if request.fed is not None]
    states = dict(zip(fed, select([_wanted(request, request in tokens) for request in fed])))
    steps = {request: _step(request, states.get(request, {}), tokens.get(request)) for request in rows}
    return {request: step for request, step in steps.items() if len(step.tokens) or _num_states(step)}


def _wanted(request: Request, is_verified: bool) -> tuple[FedStates, Sequence[int], int]:
    assert request.fed is not None, "the row was fed nothing"
    end = request.num_valid if request.call.batch.pads_finished else request.num_generated
    most = len(request.prompt) + end - 1 - request.fed.start  # the newest token's state comes with the next step
    return request.fed, request.path if is_verified else (), most


def _step(request: Request, states: Mapping[int, torch.Tensor], tokens: np.ndarray | None) -> Committed:
    start = request.fed.start if request.fed is not None else 0
    own = {layer: states[layer] for layer in request.chain.hidden_layers if layer in states}
    # A row of which other sources alone have drafted may be several steps behind, of which a tree is one.
    if tokens is None or request.verified is None or len(tokens) > len(request.path) + 1:
        new = np.empty(0, np.int64) if tokens is None else tokens
        return Committed(new, hidden_states=own, start=start, likeliest=request.likeliest)
    return Committed(
        tokens,
        np.array(request.path, np.int64),
        own,
        request.verified.scores.to(torch.float32, copy=True) if request.chain.needs_scores else None,
        request.verified.tree,
        start,
        request.likeliest,
    )


def _show_recorders(steps: Mapping[Request, Committed]) -> None:
    """Pass steps to the recorders of their requests, those of one forward in one call."""
    groups: dict[tuple[Recorder, int], dict[Request, Shown]] = {}
    for request, step in steps.items():
        logits, first = (None, 0) if request.verified is None else (id(request.verified.logits), request.verified.first)
        for recorder in request.chain.recorders:
            groups.setdefault((recorder, logits or 0), {})[request] = Shown(step, first)
    for (recorder, _), group in groups.items():
        verified = next(iter(group)).verified
        named = {request.request_id: shown for request, shown in group.items()}
        guarded(recorder.show, named, None if verified is None else verified.logits)


def _num_states(step: Committed) -> int:
    return len(next(iter(step.hidden_states.values()), ()))
