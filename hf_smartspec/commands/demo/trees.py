"""A step's draft tree as a picture."""

from collections.abc import Sequence
from html import escape

from transformers import PreTrainedTokenizerBase

from ...decoding.trace import TracedStep
from .lanes import Lane
from .texts import slug, visible

_MOST_NODES = 28  # in a picture
_BOX, _GAP_X, _ROW, _TOP = 112, 44, 58, 14
_HEIGHT = 40


def best_step(steps: Sequence[TracedStep]) -> int:
    """Return the step to show first: of those with most accepted nodes, the one with the largest tree."""
    if not steps:
        return 0
    return max(range(len(steps)), key=lambda place: (len(steps[place].accepted), len(steps[place].tokens)))


def tree_html(lane: Lane, place: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the step number `place`, from 0 on: the text before it, its tree, and the outcome."""
    steps, tokens, labels = lane.steps, lane.tokens, lane.labels
    step = steps[place]
    before = str(tokenizer.decode(tokens[max(step.start - 24, 0) : step.start]))
    after = str(tokenizer.decode(tokens[step.start : step.start + step.num_generated]))
    context = f'<p class="ss-context">… {escape(before)}<mark>{escape(after)}</mark></p>'
    keys = "".join(f'<li><i class="{slug(label, labels)}"></i>{escape(label)}</li>' for label in labels)
    legend = (
        f'<ul class="ss-legend">{keys}<li><i class="key-accepted"></i>accepted path</li><li><i class="key-dropped"></i>'
        "not worth verifying</li></ul>"
    )
    verified, accepted = sum(step.is_verified), len(step.accepted)
    summary = (
        f"Step {place + 1} of {len(steps)}: {len(step.tokens)} drafted, {verified} verified, {accepted} accepted, and "
        "the target's own token."
    )
    if not step.tokens:
        picture = '<p class="ss-empty">Nothing was drafted in this step: the target wrote its token alone.</p>'
    else:
        picture = f'<div class="ss-scroll" tabindex="0">{tree_svg(step, tokenizer, labels)}</div>'
    return f'<div class="ss-panel ss-tree">{context}<p class="ss-summary">{summary}</p>{picture}{legend}</div>'


def tree_svg(step: TracedStep, tokenizer: PreTrainedTokenizerBase, labels: Sequence[str]) -> str:
    """Return the tree, its levels from left to right, with the path probability under each token."""
    shown = _shown(step)
    depths, rows = _layout(step, shown)
    width = (max(depths.values()) + 1) * (_BOX + _GAP_X) - _GAP_X + 4
    height = _TOP + (max(rows.values()) + 1) * _ROW + 4
    accepted = set(step.accepted)
    root_row = rows[-1]
    parts = []
    for node in shown:
        parent = step.parents[node]
        kind = "accepted" if node in accepted else "" if step.is_verified[node] else "dropped"
        parts.append(_edge(depths[parent], rows[parent], depths[node], rows[node], kind))
    parts.append(_box(0, root_row, "so far", "", "root", ""))
    for node in shown:
        kind = "accepted" if node in accepted else "" if step.is_verified[node] else "dropped"
        text = visible(str(tokenizer.decode([step.tokens[node]])))
        name = slug(step.sources[node], labels)
        parts.append(
            _box(depths[node], rows[node], text, f"{step.path_probs[node]:.0%}", f"{name} {kind}", node in accepted)
        )
    left = len(step.tokens) - len(shown)
    note = f'<p class="ss-fine">{left} less probable nodes are not drawn.</p>' if left else ""
    label = f"draft tree of {len(step.tokens)} tokens, {len(step.accepted)} of them accepted"
    return (
        f'<svg class="ss-svg" role="img" aria-label="{label}" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}">{"".join(parts)}</svg>{note}'
    )


def _shown(step: TracedStep) -> list[int]:
    """Return the nodes to draw: the accepted path and the most probable nodes, with all their ancestors."""
    order = sorted(range(len(step.tokens)), key=lambda node: (node not in step.accepted, -step.path_probs[node], node))
    shown: set[int] = set()
    for node in order:
        path = []
        while node >= 0 and node not in shown:
            path.append(node)
            node = step.parents[node]
        if len(shown) + len(path) <= _MOST_NODES or not shown:
            shown.update(path)
    return sorted(shown)


def _layout(step: TracedStep, shown: Sequence[int]) -> tuple[dict[int, int], dict[int, float]]:
    """Return level and line of each node: the likeliest leaf first, parents in the line of their first child."""
    children: dict[int, list[int]] = {}
    for node in shown:
        children.setdefault(step.parents[node], []).append(node)
    depths, rows = {-1: 0}, dict[int, float]()
    next_row = 0.0
    stack = [(-1, False)]
    while stack:
        node, is_done = stack.pop()
        below = sorted(children.get(node, ()), key=lambda item: (item not in step.accepted, -step.path_probs[item]))
        if is_done or not below:
            rows[node] = rows[below[0]] if below else next_row
            next_row += 0.0 if below else 1.0
            continue
        stack.append((node, True))
        for item in reversed(below):
            depths[item] = depths[node] + 1
            stack.append((item, False))
    return depths, rows


def _edge(from_depth: int, from_row: float, to_depth: int, to_row: float, kind: str) -> str:
    x, y = _x(from_depth) + _BOX, _y(from_row) + _HEIGHT / 2
    to_x, to_y = _x(to_depth), _y(to_row) + _HEIGHT / 2
    middle = (x + to_x) / 2
    return f'<path class="edge {kind}" d="M{x} {y}C{middle} {y} {middle} {to_y} {to_x} {to_y}"/>'


def _box(depth: int, row: float, text: str, below: str, kind: str, is_accepted: object) -> str:
    x, y = _x(depth), _y(row)
    tick = "✓ " if is_accepted else ""
    lines = f'<text x="{x + _BOX / 2}" y="{y + (17 if below else 25)}">{escape(text)}</text>'
    if below:
        lines += f'<text class="small" x="{x + _BOX / 2}" y="{y + 33}">{tick}{below}</text>'
    return f'<g class="node {kind}"><rect x="{x}" y="{y}" width="{_BOX}" height="{_HEIGHT}" rx="9"/>{lines}</g>'


def _x(depth: int) -> int:
    return 2 + depth * (_BOX + _GAP_X)


def _y(row: float) -> float:
    return _TOP / 2 + row * _ROW
