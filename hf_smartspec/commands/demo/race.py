"""The race: one prompt decoded without speculation and with it, one after the other, and replayed on one clock."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from html import escape

from ...prepare.config import SmartSpecConfig
from ..common.runs import Decoding
from .lanes import Lane, run_lane, watched
from .texts import TIMES, notice, pieces, slug
from .world import NONE, World

GENERATE, ENGINE = "transformers' generate", "our forward, no drafts"
_NO_DRAFTS = {GENERATE: None, ENGINE: NONE}
_WARM_UP = 4  # tokens


@dataclass(frozen=True)
class RaceSettings:
    """Settings of the tab."""

    prompt: str  # the prompt of both lanes
    source: str  # one of `World.names`
    baseline: str = GENERATE  # decoder of the plain lane, `GENERATE` or `ENGINE`
    decoding: Decoding = field(default_factory=Decoding)  # greedy, or sampled with a seed
    max_new_tokens: int = 96  # tokens of each lane at most
    remembers: bool = False  # whether suffix trees keep the answers of earlier races
    num_nodes: int | None = None  # draft nodes at every step; where not given, the auction decides


@dataclass
class Race:
    """Two lanes, complete or still running."""

    settings: RaceSettings
    plain: Lane = field(default_factory=Lane)
    drafted: Lane = field(default_factory=Lane)
    is_done: bool = False

    @property
    def is_complete(self) -> bool:
        return self.is_done and not (self.plain.was_stopped or self.drafted.was_stopped)

    @property
    def ratio(self) -> float:
        return self.drafted.speed / self.plain.speed if self.plain.speed else 0.0

    @property
    def first_difference(self) -> int | None:
        """The first token in which the lanes differ, or None."""
        pairs = zip(self.plain.tokens, self.drafted.tokens)
        place = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
        if place is None and len(self.plain.tokens) != len(self.drafted.tokens):
            return min(len(self.plain.tokens), len(self.drafted.tokens))
        return place


def run_race(world: World, settings: RaceSettings, stop: threading.Event) -> Iterator[tuple[str, Race]]:
    """
    Run both lanes, one after the other; yield the current activity and the race so far. Raises `RefusedError` for a
    prompt that cannot be answered.
    """
    ids = world.encode(settings.prompt, settings.max_new_tokens)
    race = Race(settings)
    nodes, plain = settings.num_nodes, _NO_DRAFTS[settings.baseline]
    source = SmartSpecConfig(world.new_source(settings.source, settings.remembers), num_nodes=nodes, trace=True)
    baseline = None if plain is None else SmartSpecConfig(world.new_source(plain))
    lanes = [("plain", baseline, race.plain), ("speculative", source, race.drafted)]
    yield "warming up", race
    for name, assistant, lane in lanes:
        if stop.is_set():
            lane.was_stopped = True
            continue
        warm = assistant and replace(
            assistant, assistant=world.new_source(settings.source if lane is race.drafted else NONE)
        )
        warm_up = partial(run_lane, world, ids, settings.decoding, _WARM_UP, warm, stop, Lane())
        work = partial(run_lane, world, ids, settings.decoding, settings.max_new_tokens, assistant, stop, lane)
        for _ in watched(world, warm_up):
            yield f"warming up the {name} lane", race
        for _ in watched(world, work):
            yield f"timing the {name} lane, alone", race
    race.is_done = True
    yield "", race


def progress_html(doing: str, race: Race) -> str:
    most = race.settings.max_new_tokens
    rows = "".join(
        f'<div class="ss-progress"><span>{name}</span><div class="ss-track">'
        f'<i style="width:{100 if lane.seconds else round(100 * min(len(lane.tokens) / most, 1))}%"></i>'
        f"</div><b>{len(lane.tokens)}</b></div>"
        for name, lane in (("plain", race.plain), ("speculative", race.drafted))
    )
    return f'<div class="ss-panel"><p class="ss-doing" role="status">{escape(doing)} …</p>{rows}</div>'


def race_html(world: World, race: Race) -> str:
    """Return both lanes with all their tokens and times, which the page's script replays."""
    if not race.is_complete:
        return notice("Stopped: a race is shown once both lanes have been timed.")
    labels = race.drafted.labels
    lanes = _lane_html(world, race.plain, f"plain · {race.settings.baseline}", labels, "plain")
    lanes += _lane_html(world, race.drafted, f"speculative · {race.settings.source}", labels, "drafted")
    longest = max(race.plain.seconds, race.drafted.seconds)
    return (
        f'<div class="ss-panel ss-race" data-longest="{longest:.4f}" data-ratio="{race.ratio:.3f}">'
        f"{_head_html(race)}{_legend_html(race, labels)}"
        f'<div class="ss-lanes">{lanes}</div>{_verdict_html(world, race)}{_timing_html(race)}</div>'
    )


def _head_html(race: Race) -> str:
    return (
        '<div class="ss-head"><div class="ss-ratio"><b class="ss-ratio-value">'
        f'{race.ratio:.2f}</b><span>{TIMES} as fast</span></div><div class="ss-clock"><b class="ss-time"></b>'
        '<label>replay at <select class="ss-speed" aria-label="speed of the replay"><option value="1">real speed'
        '</option><option value="0.5">half speed</option><option value="0.25">quarter speed</option>'
        '<option value="0.1">a tenth</option></select></label><button class="ss-replay" type="button">Replay</button>'
        "</div></div>"
    )


def _legend_html(race: Race, labels: list[str]) -> str:
    counts = {label: race.drafted.sources.count(label) for label in labels}
    items = [("target", f"the target ({race.drafted.sources.count(None)} tokens)")]
    items += [(slug(label, labels), f"drafted by {label} ({counts[label]})") for label in labels]
    keys = "".join(f'<li><i class="{name}"></i>{escape(text)}</li>' for name, text in items)
    return f'<ul class="ss-legend" aria-label="who wrote a token">{keys}</ul>'


def _lane_html(world: World, lane: Lane, title: str, labels: list[str], name: str) -> str:
    words = pieces(lane.tokens, world.tokenizer)
    spans = "".join(
        f'<span class="t {slug(source, labels)}" data-t="{when:.4f}">{escape(text)}</span>'
        for text, source, when in zip(words, lane.sources, lane.times)
    )
    return (
        f'<section class="ss-lane {name}" data-seconds="{lane.seconds:.4f}"><h3>{escape(title)}</h3>'
        f'<p class="ss-figures"><b class="ss-rate">{lane.speed:.1f}</b> tokens/s · <span class="ss-count">'
        f'{len(lane.tokens)}</span> tokens in <span class="ss-elapsed">{lane.seconds:.2f}</span> s</p>'
        f'<div class="ss-track"><i></i></div><div class="ss-text" tabindex="0" aria-label="{name} answer">{spans}</div>'
        "</section>"
    )


def _verdict_html(world: World, race: Race) -> str:
    counts = race.drafted.statistics
    place = race.first_difference
    if place is None:
        verdict = f'<b class="ss-same">Identical.</b> All {len(race.plain.tokens)} tokens are the same in both lanes.'
    elif world.is_exact or (world.is_reproducible and race.settings.baseline == ENGINE):
        verdict = (
            f'<b class="ss-differs">Not identical</b> from token {place + 1} on, which must not be: please report it.'
        )
    else:
        verdict = (
            f'<b class="ss-differs">Not identical</b> from token {place + 1} on. In {world.dtype}, these two forwards '
            "round differently, and a tie between two words may fall otherwise; in float32 (--dtype float32) texts are "
            "the same."
        )
    facts = (
        f"{counts.steps} forwards for {len(race.drafted.tokens)} tokens "
        f"({counts.mean_accepted_length:.2f} a forward); {counts.accepted_tokens} of {counts.drafted_tokens} verified "
        f"drafts were accepted."
    )
    if not counts.drafted_tokens and race.settings.source != NONE:
        facts = (
            "Nothing that was drafted seemed worth its cost in this model's forward, so nothing was speculated: the "
            "ratio is that of two plain decoders."
        )
    return f'<p class="ss-verdict">{verdict} {facts}</p>'


def usual_baseline(world: World) -> str:
    """Return the default of the plain lane: in half precision our own forward, which rounds as with drafts."""
    return GENERATE if world.is_exact else ENGINE


def why_baseline(world: World) -> str:
    """Return the text beside the choice of the plain lane."""
    if world.is_exact:
        return "Against our own forward, the ratio is the gain of speculation alone."
    return (
        f"In {world.dtype}, transformers' generate rounds otherwise than our forward, and texts part where two words "
        "are nearly tied: plain is our own forward unless you choose."
    )


def _timing_html(race: Race) -> str:
    source = (
        "generate() of transformers without an assistant"
        if race.settings.baseline == GENERATE
        else ("this library's own forward without drafts, so that the ratio is the gain of speculation alone")
    )
    memory = "Sources remember earlier races." if race.settings.remembers else "Sources began with an empty memory."
    return (
        '<p class="ss-fine">How it was timed: the plain lane first, then the speculative one, each alone on this '
        f"machine after {_WARM_UP} tokens of warm-up, prompt included; then both are replayed on one clock. Plain is "
        f"{source}. One run each: times on a busy machine vary. The speculative lane also keeps who wrote what, in its "
        f"own time. {memory}</p>"
    )
