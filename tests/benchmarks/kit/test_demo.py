"""Benches where the demo's models and prompts are missing: each says what to pass."""

import pytest

from ...commands.helpers import check_demo_is_needed
from ..helpers import bench


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        (["timeline", "{file}"], "--model"),
        (["batch"], "FILE and --model"),
        (["queue"], "FILE and --model"),
        (["peers"], ""),
        (["memory"], "FILE and --model"),
        (["simulate"], "FILE and --model"),
        (["sources", "{file}"], "--model"),
    ],
)
def test_a_bench_says_what_to_pass(arguments, needed, tmp_path, monkeypatch, capsys):
    check_demo_is_needed(bench, arguments, needed, tmp_path, monkeypatch, capsys)
