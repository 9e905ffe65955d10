"""Verification: the tokens that the target picks after each node of a draft, and the path that they accept."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from ..candidates.committed import Likeliest
from ..cpu.screening import Picks
from ..device import fetch_together, has_float64, to_device
from ..drafts.kernels.trees import walk
from ..drafts.tree import DraftTree
from ..sampling.noise import NO_TOKEN, noisy_argmax, uniform_noise
from .call import DecodingCall, Place, Request, alike

_TOP_LINES = 32  # lines of a step whose likeliest tokens sources get: more would cost more than sources learn

# Acceptance draws from a stream of its own, independent of the residual's and the draft's.
_ACCEPT_STREAM = 0x5EED_ACCE

# ε and δ of typical acceptance, as Medusa's authors set them: δ is the square root of ε.
_EPSILON, _DELTA = 0.09, 0.3

_FEW_NODES = 128  # up to here a loop in Python takes less time than the overhead of a compiled call

# Scores that are processed together where tokens are picked at all nodes at once: about 100 MB of memory.
_MOST_AHEAD = 2**24


def greedy_picks(
    rows: list[Request],
    drafts: dict[Request, DraftTree],
    offsets: list[int],
    logits: torch.Tensor | Picks,
    has_asked: bool,
) -> list[int]:
    """
    Return the arg max of every line if some row needs it, and keep likely tokens for sources that want them, where some
    source was asked in this step; otherwise what they learn is not worth its time.
    """
    forward, count = rows[0].call.forward, max([request.chain.num_likeliest for request in rows]) if has_asked else 0
    is_greedy = any([request.call.picks_greedily for request in rows])
    top = forward.top(logits, count, _TOP_LINES, is_greedy) if count else None
    if top is None:
        return forward.argmax(logits) if is_greedy else []
    for request, first in zip(rows, offsets):
        if first < len(top.tokens) and request in drafts and request.chain.num_likeliest:
            before, tokens = request.ends_of(drafts[request])
            lines = slice(first, first + len(tokens))
            following, shares = top.tokens[lines], top.shares[lines]  # of the first `_TOP_LINES` lines only
            request.likeliest = Likeliest(before[: len(shares)], tokens[: len(shares)], following, shares)
    return top.argmax


def accepted_path(tree: DraftTree, picks: Sequence[int]) -> list[int]:
    """
    Return the nodes that hold the target's tokens, from the root on: `picks[n + 1]` is its token after node n, and
    `picks[0]` its token after the last committed one.
    """
    path: list[int] = []
    last = -1
    for node, (parent, token) in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist())):
        if parent == last and token == picks[last + 1]:  # parents stand before their children
            path.append(node)
            last = node
    return path


def accepted_paths(trees: Sequence[DraftTree], picks: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the `accepted_path` of every row, computed in one compiled call where there are many nodes."""
    sizes = [len(tree.tokens) for tree in trees]
    num_nodes = sum(sizes)
    if num_nodes <= _FEW_NODES:
        return [accepted_path(tree, row) if size else [] for tree, row, size in zip(trees, picks, sizes)]
    parents, tokens = (_end_to_end([getattr(tree, name) for tree in trees]) for name in ("parents", "tokens"))
    if not len(parents) == len(tokens) == num_nodes:  # compiled code relies on it
        raise ValueError(f"A draft must have as many parents as tokens, got {len(parents)} and {num_nodes} in all.")
    numbers = np.fromiter(chain.from_iterable(picks), np.int64, num_nodes + len(sizes))
    path, counts = np.empty(num_nodes, np.int64), np.empty(len(sizes), np.int64)
    walk(np.array(sizes), parents, tokens, numbers, path, counts)
    nodes, paths, start = path.tolist(), [], 0
    for count in counts.tolist():
        paths.append(nodes[start : start + count])
        start += count
    return paths


def _end_to_end(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays, dtype=np.int64, casting="same_kind")


def coupled_picks(places: Sequence[Place], scores: torch.Tensor) -> list[int]:
    """
    Return the target's own tokens: the arg max of processed scores (`[places, vocab_size]`), with Gumbel noise added
    in sampling rows. A draft node is accepted if it *is* the token, so the outcome cannot depend on the drafts.
    """
    return noisy_argmax(scores, [place.request.seed for place in places], [place.position for place in places])


def rejection_picks(places: Sequence[Place], scores: torch.Tensor) -> list[int]:
    """
    Return tokens by speculative sampling (Leviathan et al., 2023, algorithm 1; Chen et al., 2023) for chains with
    draft distributions q: the draft token x is kept with probability min(1, p(x) / q(x)), else a token is drawn from
    max(0, p - q). The output has the target's distribution, but the tokens depend on the drafts. Rows without draft
    distributions, and greedy rows, get `coupled_picks`.
    """
    if scores.device.type == "cpu":  # no device to wait for: residuals are drawn for rejected tokens only
        return [_rejection_pick(place, line) for place, line in zip(places, scores)]
    lines = [line for line, place in enumerate(places) if _has_distribution(place)]
    if lines:
        own = to_device(np.array(lines), scores.device)
        certain = _kept_or_residual([places[line] for line in lines], scores.index_select(0, own))
        scores = scores.index_copy(0, own, certain)
    return coupled_picks(places, scores)


def _has_distribution(place: Place) -> bool:
    request, tree = place.request, place.request.tree
    has_some = request.seed is not None and tree is not None and tree.distributions is not None
    return has_some and place.node + 1 < len(tree)  # type: ignore[arg-type]


def _rejection_pick(place: Place, scores: torch.Tensor) -> int:
    if not _has_distribution(place):
        return coupled_picks([place], scores[None])[0]
    tree, target = place.request.tree, scores.softmax(dim=-1)
    draft = tree.distributions[place.node + 1].to(scores.device)  # type: ignore[union-attr]
    token = int(_drafted([place])[0])
    if float(_uniform([place])[0]) * float(draft[token]) < float(target[token]):
        return token
    return coupled_picks([place], _residual(target, draft).log()[None])[0]


def _kept_or_residual(places: Sequence[Place], scores: torch.Tensor) -> torch.Tensor:
    """Return scores `[places, vocab_size]`: of the draft's token alone where it is kept, else of max(0, p - q)."""
    target, draft = scores.softmax(dim=-1), _draft_distributions(places).to(scores.device)
    tokens = to_device(_drafted(places), scores.device)[:, None]
    precision = np.float64 if has_float64(scores.device) else np.float32
    uniform = to_device(_uniform(places).astype(precision), scores.device)[:, None]
    is_kept = uniform * draft.gather(1, tokens) < target.gather(1, tokens)
    kept = torch.zeros_like(target).scatter(1, tokens, 1.0)
    return torch.where(is_kept, kept, _residual(target, draft)).log()


def _residual(target: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """Return max(0, p - q), not normalised; p itself where p equals q up to rounding."""
    residual = (target - draft).clamp(min=0)
    return torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, target)


def _drafted(places: Sequence[Place]) -> np.ndarray:
    """Return the draft's tokens after these places, int64 `[places]`."""
    return np.array([place.request.tree.tokens[place.node + 1] for place in places])  # type: ignore[union-attr]


def _draft_distributions(places: Sequence[Place]) -> torch.Tensor:
    return torch.stack([place.request.tree.distributions[place.node + 1] for place in places])  # type: ignore


def _uniform(places: Sequence[Place]) -> np.ndarray:
    """Return uniform variates from a stream of their own, float64 `[places]`."""
    seeds = [(place.request.seed or 0) ^ _ACCEPT_STREAM for place in places]
    return uniform_noise(seeds, [place.position for place in places])


def typical_picks(places: Sequence[Place], scores: torch.Tensor) -> list[int]:
    """
    Return tokens by typical acceptance (Medusa, Cai et al., 2024, section 2.3.1), which *changes the distribution*: a
    draft token x is kept if p(x) > min(ε, δ exp(-H(p))), whatever the target would have drawn; of several such tokens,
    the likeliest. `coupled_picks` apply where the draft holds their token or no typical one, and to greedy rows.
    """
    picks = coupled_picks(places, scores)
    drafted = {line: tokens for line, place in enumerate(places) if (tokens := _drafted_after(place))}
    lines = [line for line, tokens in drafted.items() if picks[line] not in tokens]
    if not lines:
        return picks
    width = max(len(drafted[line]) for line in lines)
    rows = np.array([(drafted[line] * width)[:width] for line in lines])
    probs = scores.index_select(0, to_device(np.array(lines), scores.device)).softmax(dim=-1)
    least = (_DELTA * (-torch.special.entr(probs).sum(dim=-1)).exp()).clamp(max=_EPSILON)
    best = probs.gather(1, to_device(rows, probs.device)).max(dim=-1)
    for line, row, place, is_typical in zip(lines, rows, *fetch_together([best.indices, best.values > least])):
        if is_typical:
            picks[line] = int(row[place])
    return picks


def _drafted_after(place: Place) -> list[int]:
    """Return the draft's tokens after a place of a sampling row; none for greedy rows."""
    tree = place.request.tree
    if place.request.seed is None or tree is None:
        return []
    tokens: list[int] = tree.tokens[tree.parents == place.node].tolist()
    return tokens


def picks_ahead(rows: Sequence[Request]) -> bool:
    """
    Return whether tokens are picked after all nodes of these rows at once, with one wait for the device. On a CPU,
    without such waits, the work for nodes after rejected ones would be wasted.
    """
    return rows[0].call.may_pick_ahead and rows[0].node_logits.device.type != "cpu"


def pick_ahead(rows: Sequence[Request]) -> None:
    """Store the target's tokens after every node in rows that pick alike; `_MOST_AHEAD` scores at a time."""
    for part in _in_parts(rows):
        _pick_together(part)


def _in_parts(rows: Sequence[Request]) -> Iterator[list[Request]]:
    part: list[Request] = []
    num = 0
    for request in rows:
        own = request.node_logits.numel()
        if part and num + own > _MOST_AHEAD:
            yield part
            part, num = [], 0
        part.append(request)
        num += own
    yield part


def _pick_together(rows: Sequence[Request]) -> None:
    call = rows[0].call
    places = [place for request in rows for place in Place.all_of(request)]
    logits = torch.cat([request.node_logits for request in rows]).to(torch.float32)
    scores = call.picker.process([place.request for place in places], logits, call.batch)
    for place, token in zip(places, call.pick(places, scores)):
        place.request.picks.append(token)


METHODS = {"coupled": coupled_picks, "rejection": rejection_picks, "typical": typical_picks}


def follow(request: Request, path: list[int]) -> None:
    """Append the picks along the accepted path and the one after it, unless the row ends before."""
    batch, picks = request.call.batch, request.picks
    tokens = [picks[0], *[picks[node + 1] for node in path]] if path else picks[:1]
    if tokens[-1] != NO_TOKEN and batch.cannot_stop_within(request, tokens):
        request.extend(tokens)
        request.path = path
        return
    for num_accepted, token in enumerate(tokens):
        _append(request, token)
        if not batch.is_active(request):
            path = path[:num_accepted]
            break
    request.path = path


def _append(request: Request, token: int) -> None:
    if token == NO_TOKEN:
        raise RuntimeError(
            "No token can be sampled, since the model's logits, or what logits processors made of them, are NaN or "
            "infinite. `remove_invalid_values=True` replaces such scores."
        )
    request.append(token)
    request.call.batch.check_stop(request)


def pick_next(rows: Sequence[Request]) -> list[int]:
    """Return the target's next token for each row, from the logits at the row's cursor."""
    call = rows[0].call
    batch = call.batch
    logits = torch.stack([request.node_logits[request.cursor + 1] for request in rows]).to(torch.float32)
    scores = call.picker.process(rows, logits, batch)
    for request, raw, line in zip(rows, logits, scores):
        if batch.records_logits:
            request.raw_logits.append(raw)
        if batch.records_scores:
            request.scores.append(line)
    tokens = call.pick([Place.at_cursor(request) for request in rows], scores)
    return [batch.pad_token_id if batch.is_padding(request) else token for request, token in zip(rows, tokens)]


def advance(request: Request, token: int) -> bool:
    """Append the token, and return whether the draft holds it, so that the same forward has the next logits."""
    _append(request, token)
    if not request.is_active:
        return False
    assert request.tree is not None, "the request has no draft under verification"
    child = request.tree.child(request.cursor, token)
    if child is None:
        return False
    request.cursor = child
    request.path.append(child)
    return True


def verify_rows(rows: Sequence[Request], calls: Sequence[DecodingCall], attempt: Callable[..., Any]) -> list[Request]:
    """
    Advance rows along their trees, and return those whose path has ended.

    Args:
        rows (sequence of `Request`): All running rows.
        calls (sequence of `DecodingCall`): The running calls, from which `attempt` removes those that fail.
        attempt (`Callable`): Gets rows, a function and its arguments. If the function fails, only these rows' calls do.
    """
    ready = [request for request in rows if request.tree is not None]
    others = [request for request in ready if not request.call.picks_greedily]
    for group in alike(others):
        if picks_ahead(group):
            attempt(group, pick_ahead, group)
    ended = [request for request in ready if request.picks]
    trees = [request.tree for request in ended if request.tree is not None]
    assert len(trees) == len(ended), "picks belong to a draft under verification"
    paths = accepted_paths(trees, [request.picks for request in ended])
    for request, path in zip(ended, paths):
        attempt([request], follow, request, path)
    alive = set(calls)  # without calls that have failed meanwhile
    ended = [request for request in ended if request.call in alive]
    others = [request for request in others if not request.picks and request.call in alive]
    return ended + _verify_in_rounds(others, calls, attempt)


def _verify_in_rounds(
    ready: list[Request], calls: Sequence[DecodingCall], attempt: Callable[..., Any]
) -> list[Request]:
    """Pick one token of every row per round, so that processors get many rows in one call; as `verify_rows`."""
    ended: list[Request] = []
    while ready := [request for request in ready if not request.call.waits_for_more(ready)]:
        still: list[Request] = []
        for rows in alike(ready):
            tokens = attempt(rows, pick_next, rows) or []
            for request, token in zip(rows, tokens):
                if attempt([request], advance, request, token):
                    still.append(request)
        for call in dict.fromkeys(request.call for request in ready):
            if not call.picker.is_known:  # processors and criteria may share state, so that they are called in turn
                attempt(call.requests, call.batch.report)
        alive = set(calls)  # without calls that have failed meanwhile
        still = [request for request in still if request.is_active and request.call in alive]
        going_on = set(still)
        ended += [request for request in ready if request.call in alive and request not in going_on]
        ready = still
    return ended
