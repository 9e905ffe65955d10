"""The decoding loop by itself: what it counts."""

import pytest

from benchmarks.step.overhead import host
from benchmarks.step.overhead.host import make_setting
from hf_smartspec.goodput import FixedLength


def test_the_time_of_prompts_is_that_of_the_steps_that_run_them():
    setting = make_setting("none", 2, num_steps=3)
    statistics, ends = setting.loop.statistics, []
    for _ in range(3):
        setting.loop.step()
        ends.append(setting.forward.clock())
    assert statistics.seconds_total == pytest.approx(ends[-1]), "of this clock, whose time forwards alone take"
    assert statistics.seconds_prefill == ends[0] > 0


class Slow(FixedLength):
    """Takes a second to select, and ten to learn."""

    def select(self, rows, trees):
        self.clock.advance(1.0)
        return super().select(rows, trees)

    def observe(self, outcome):
        self.clock.advance(10.0)
        self.seconds += [stage.seconds for stage in outcome.rows.stages]


@pytest.mark.parametrize("num_nodes", [3, 0])
def test_the_time_of_drafting_is_all_that_the_host_does_for_drafts(num_nodes, monkeypatch):
    policy = Slow(num_nodes)
    monkeypatch.setattr(host, "_policy", lambda *_: policy)
    setting = make_setting("suffix", 2, num_steps=3)
    policy.clock, policy.seconds = setting.loop.clock, []
    for _ in range(3):
        setting.loop.step()
    assert policy.seconds == pytest.approx([1.0, 11.0, 11.0] if num_nodes else [0.0] * 3)
