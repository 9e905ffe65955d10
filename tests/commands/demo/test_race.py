"""Races without a browser: lanes, who wrote what, and their pictures."""

import copy
import re
import threading
from dataclasses import replace

import pytest

from hf_smartspec import TracedStep
from hf_smartspec.commands.common.runs import Decoding
from hf_smartspec.commands.demo.charts import Series, chart_html
from hf_smartspec.commands.demo.lanes import Lane
from hf_smartspec.commands.demo.race import (
    ENGINE,
    GENERATE,
    RaceSettings,
    progress_html,
    race_html,
    run_race,
    usual_baseline,
    why_baseline,
)
from hf_smartspec.commands.demo.texts import pieces, visible
from hf_smartspec.commands.demo.trees import best_step, tree_html
from hf_smartspec.commands.demo.world import AUTO, NONE, RefusedError, World

from .conftest import GRADIO

TOKENS = 24


def _race(world, stop=None, **settings):
    settings = {"prompt": world.prompts["sql"][0], "source": "draft", "max_new_tokens": TOKENS} | settings
    frames = list(run_race(world, RaceSettings(**settings), stop or threading.Event()))
    assert all("timing" in progress_html(doing, race) for doing, race in frames if doing.startswith("timing"))
    return frames[-1][1]


@pytest.mark.parametrize("baseline", [GENERATE, ENGINE])
def test_both_lanes_write_the_same(world, baseline):
    decoding = Decoding(seed=3) if baseline == GENERATE else Decoding()
    race = _race(world, baseline=baseline, decoding=decoding, num_nodes=4)
    assert race.is_complete and race.first_difference is None and race.plain.tokens == race.drafted.tokens
    for lane in (race.plain, race.drafted):
        assert len(lane.tokens) == len(lane.times) == len(lane.sources) > 0
        assert lane.times == sorted(lane.times) and lane.times[-1] <= lane.seconds
    assert set(race.plain.sources) == {None} and set(race.drafted.sources) == {None, "draft_model"}
    accepted = sum(source is not None for source in race.drafted.sources)
    assert accepted == race.drafted.statistics.accepted_tokens == sum(len(x.accepted) for x in race.drafted.steps)
    page = race_html(world, race)
    assert "Identical." in page and f"drafted by draft_model ({accepted})" in page
    assert page.count('class="t ') == 2 * len(race.plain.tokens)
    shown = re.findall(r'class="t (\S+)" data-t="([\d.]+)"', page)[len(race.plain.tokens) :]
    assert [name != "target" for name, _ in shown] == [source is not None for source in race.drafted.sources]
    assert tree_html(race.drafted, best_step(race.drafted.steps), world.tokenizer)


@pytest.fixture
def title():
    """Function that returns the title of a world's page."""
    from hf_smartspec.commands.demo.app import _title

    return _title


@GRADIO
def test_in_half_precision_the_plain_lane_is_our_own_and_the_page_says_why(world, title):
    assert usual_baseline(world) == GENERATE and "Faster text, the same text" in title(world)
    half = replace(world, model=copy.deepcopy(world.model).bfloat16())
    assert usual_baseline(half) == ENGINE
    assert ("Faster text, the same text" in title(half)) == half.is_reproducible
    assert "In bfloat16, transformers' generate rounds otherwise" in why_baseline(half)


@GRADIO
@pytest.mark.parametrize("is_reproducible", [True, False])
@pytest.mark.parametrize("baseline", [GENERATE, ENGINE])
def test_a_difference_is_to_be_reported_where_texts_must_be_the_same(
    world, title, monkeypatch, is_reproducible, baseline
):
    half = replace(world, model=copy.deepcopy(world.model).bfloat16())
    monkeypatch.setattr(World, "is_reproducible", is_reproducible)
    assert ("the same up to rounding" in title(half)) != is_reproducible
    race = _race(half, baseline=baseline, max_new_tokens=4)
    race.drafted.tokens[1] = race.plain.tokens[1] + 1
    page = race_html(half, race)
    assert "from token 2 on" in page
    assert ("please report it" in page) == (is_reproducible and baseline == ENGINE)


def test_every_source_of_the_page_drafts(world):
    assert {AUTO, "prompt_lookup", "draft", "medusa", "eagle3", "suffix + draft", NONE} == set(world.names)
    for name, label in (("medusa", "medusa"), ("eagle3", "eagle3"), ("suffix + draft", "draft_model")):
        race = _race(world, source=name, max_new_tokens=8, num_nodes=3)
        assert race.first_difference is None
        assert label in {source for step in race.drafted.steps for source in step.sources}


def test_memory_is_only_kept_where_it_is_asked_for(world):
    first, second = (_race(world, source=AUTO, remembers=True, num_nodes=4) for _ in range(2))
    fresh = _race(world, source=AUTO, num_nodes=4)
    accepted = [race.drafted.statistics.accepted_tokens for race in (first, second, fresh)]
    assert accepted[1] > accepted[0] == accepted[2]


def test_a_stopped_race_shows_no_figures(world):
    stop = threading.Event()
    race = None
    for doing, race in run_race(world, RaceSettings(world.prompts["sql"][0], AUTO, max_new_tokens=200), stop):  # noqa: B007
        if doing.startswith("timing"):
            stop.set()
    assert race.is_done and not race.is_complete and len(race.drafted.tokens) < 200
    assert "Stopped" in race_html(world, race)


@pytest.mark.parametrize("prompt, words", [(" \n", "no prompt yet"), ("word " * 3000, "shorten the prompt")])
def test_prompts_that_cannot_be_answered_are_refused(world, prompt, words):
    with pytest.raises(RefusedError, match=words):
        _race(world, prompt=prompt)


def test_text_is_no_markup(world):
    race = _race(world, source=NONE, max_new_tokens=4)
    race.drafted.tokens[0] = race.plain.tokens[0] = world.tokenizer("<").input_ids[0]
    assert "&lt;" in race_html(world, race)


def test_characters_of_several_tokens_stay_whole(world):
    text = "naïve → ✓ end"
    tokens = world.tokenizer(text, add_special_tokens=False).input_ids
    assert len(tokens) > len(text.split())
    assert "".join(pieces(tokens, world.tokenizer)) == world.tokenizer.decode(tokens)
    assert visible(" a\n") == "␣a⏎" and len(visible("x" * 40)) == 14


def _step(num, accepted=(), is_verified=True):
    nodes = range(num)
    probs = [0.9**node for node in nodes]
    return TracedStep(0, [5] * num, [-1, *nodes][:num], probs, ["suffix"] * num, [is_verified] * num, list(accepted), 1)


def test_a_tree_shows_what_was_accepted_and_what_was_dropped(world):
    step = TracedStep(
        start=0, tokens=[10, 11, 12, 13], parents=[-1, -1, 0, 1], path_probs=[0.75, 0.2, 0.5, 0.1],
        sources=["suffix", "draft_model", "suffix", "draft_model"], is_verified=[True, True, True, False],
        accepted=[0, 2], num_generated=3,
    )  # fmt: skip
    page = tree_html(Lane([10, 12, 20], steps=[step]), 0, world.tokenizer)
    assert page.count("<rect") == 5 and page.count('class="edge accepted"') == 2
    assert page.count("✓ 75%") == 1 and page.count("✓ 50%") == 1 and ">20%<" in page
    assert page.count('dropped"><rect') == 1 and "4 drafted, 3 verified, 2 accepted" in page
    boxes = {(x, y) for x, y in re.findall(r'<rect x="(\d+)" y="([\d.]+)"', page)}
    assert len(boxes) == 5, "no two nodes in one place"


def test_large_trees_keep_the_accepted_path(world):
    step = _step(60, accepted=range(40))
    page = tree_html(Lane([5] * 10, steps=[_step(0), step]), 1, world.tokenizer)
    assert page.count('class="edge accepted"') == 28 and "32 less probable nodes are not drawn" in page
    assert "Nothing was drafted" in tree_html(Lane([5] * 10, steps=[_step(0), step]), 0, world.tokenizer)
    assert best_step([_step(3), step, _step(5, [0])]) == 1 and best_step([]) == 0


def test_charts_scale_to_what_they_show():
    page = chart_html("Speed", "tokens", [Series("one", "plain", [(0, 0), (5, 12.0)])], "s", 10, marks=[(2, "taken")])
    assert ">20<" in page and ">10 s<" in page and page.count("<polyline") == 1 and "mark taken" in page
    (points,) = re.findall(r'points="([^"]+)"', page)
    (x, y), (to_x, to_y) = ((float(v) for v in point.split(",")) for point in points.split())
    assert to_x > x and to_y < y, "upwards"
    assert "polyline" not in chart_html("Empty", "", [Series("one", "plain", [])], "s", 1)
