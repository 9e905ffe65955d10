"""The decoding loop by itself: what it counts."""

import pytest

from benchmarks.step.overhead.host import make_setting


def test_the_time_of_prompts_is_that_of_the_steps_that_run_them():
    setting = make_setting("none", 2, num_steps=3)
    statistics, ends = setting.loop.statistics, []
    for _ in range(3):
        setting.loop.step()
        ends.append(setting.forward.clock())
    assert statistics.seconds_total == pytest.approx(ends[-1]), "of this clock, whose time forwards alone take"
    assert statistics.seconds_prefill == ends[0] > 0
