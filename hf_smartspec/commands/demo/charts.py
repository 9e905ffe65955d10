"""Line charts as SVG."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 420, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 12, 12, 34


@dataclass(frozen=True)
class Series:
    """A line or a cloud of points."""

    label: str
    kind: str  # class by which the style sheet colours it
    points: Sequence[tuple[float, float]]  # points from left to right
    is_dots: bool = False  # whether points are not joined


def chart_html(
    title: str,
    unit: str,
    series: Sequence[Series],
    x_label: str,
    x_most: float,
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """
    Return a chart with its title and legend.

    Args:
        x_most (`float`): End of the x axis. Both axes begin at 0; the y axis ends above the highest point.
        marks (sequence of pairs): Positions and kinds of upright lines.
    """
    highest = max([y for item in series for _, y in item.points], default=0.0)
    top = _round_up(highest)
    x_most = max(x_most, 1e-9)

    def at(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + min(x / x_most, 1) * (_WIDTH - _LEFT - _RIGHT)
        return round(across, 1), round(_HEIGHT - _BOTTOM - min(y / top, 1) * (_HEIGHT - _TOP - _BOTTOM), 1)

    parts = []
    for share in (0, 0.5, 1):
        x, y = at(0, share * top)
        parts.append(f'<line class="grid" x1="{x}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 7}" y="{y + 4}" text-anchor="end">{_short(share * top)}</text>')
    for share, anchor in ((0, "start"), (1, "end")):
        x, _ = at(share * x_most, 0)
        text = f"{_short(share * x_most)}{' ' + x_label if share else ''}"
        parts.append(f'<text class="tick" x="{x}" y="{_HEIGHT - 12}" text-anchor="{anchor}">{escape(text)}</text>')
    for x, kind in marks:
        across, _ = at(x, 0)
        parts.append(f'<line class="mark {kind}" x1="{across}" x2="{across}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>')
    for item in series:
        points = [at(x, y) for x, y in item.points]
        if item.is_dots:
            parts += [f'<circle class="{item.kind}" cx="{x}" cy="{y}" r="4"/>' for x, y in points]
        elif points:
            line = " ".join(f"{x},{y}" for x, y in points)
            parts.append(f'<polyline class="{item.kind}" points="{line}"/>')
    keys = "".join(f'<li><i class="{item.kind}"></i>{escape(item.label)}</li>' for item in series)
    return (
        f'<figure class="ss-chart"><figcaption>{escape(title)} <span>{escape(unit)}</span></figcaption>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
        f'<ul class="ss-legend">{keys}</ul></figure>'
    )


def charts(*items: str) -> str:
    return f'<div class="ss-charts">{"".join(items)}</div>'


def _round_up(value: float) -> float:
    """Return the next larger of 1, 2, 2.5, 5, 10, ... times a power of ten."""
    if value <= 0:
        return 1.0
    power = 1.0
    while power < value:
        power *= 10
    while power / 10 >= value:
        power /= 10
    return next(power * share for share in (0.1, 0.2, 0.25, 0.5, 1.0) if power * share >= value - 1e-12)


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 10 or value == int(value) else f"{value:.3g}"
