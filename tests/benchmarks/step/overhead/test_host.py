"""The host time of steps: what is measured is the decoding loop at work, and the report says which limits are met."""

import io

import pytest
from rich.console import Console
from transformers import LlamaConfig

from benchmarks.kit.session import Session
from benchmarks.step.overhead import host
from benchmarks.step.overhead.host import DRAFTS, make_setting
from benchmarks.step.overhead.stubs import CALL, stub_config
from hf_smartspec.target_model.layout.row_groups import call_columns


@pytest.mark.parametrize("drafts", DRAFTS)
def test_rows_say_what_is_known_and_drafts_come_true(drafts):
    setting = make_setting(drafts, 3, num_steps=20)
    requests = setting.loop.running[:]
    for _ in range(20):
        setting.loop.step()
    statistics = setting.loop.statistics
    for request in requests:
        assert len(request.tokens) >= 20
        text = setting.forward.text(request.cache_row)
        assert [*request.prompt.tolist(), *request.tokens] == text[: request.length]
    assert statistics.steps == 60
    if drafts == "none":
        assert statistics.drafted_tokens == 0
    else:
        assert 20 < statistics.accepted_tokens < statistics.drafted_tokens


def test_trees_are_verified_to_their_last_node(monkeypatch):
    monkeypatch.setattr(host, "WARMUP", 5)
    row = host._measured("trees of 64", 2, num_steps=8)
    assert row["nodes_per_row"] == 64


def test_every_setting_is_measured_and_held_against_its_limit(monkeypatch):
    monkeypatch.setattr(host, "WARMUP", 2)
    monkeypatch.setattr(host, "LIMITS", {("none", 1): 1e9, ("suffix", 2): 0.0})
    session, output = Session({}), io.StringIO()
    assert session.run([host.section(2, (1, 2))], Console(file=output, width=200)) == 1
    results = list(session.rows("host").values())
    assert [(row["drafts"], row["rows"]) for row in results] == [(name, num) for name in DRAFTS for num in (1, 2)]
    assert all(0 < row["least_milliseconds"] <= row["milliseconds"] for row in results)
    assert {(row["drafts"], row["rows"]): row["is_met"] for row in results if row["limit"] is not None} == {
        ("none", 1): True,
        ("suffix", 2): False,
    }
    assert "missed: suffix at 2" in output.getvalue()


@pytest.mark.parametrize("drafts", DRAFTS)
def test_calls_of_python_functions_grow_no_faster_than_the_rows(drafts, monkeypatch):
    monkeypatch.setattr(host, "WARMUP", 3)
    few, many = (host._measured(drafts, num, num_steps=1)["python_calls"] for num in (8, 64))
    assert many < 64 / 8 * few


def test_a_call_of_attention_costs_what_it_does_on_a_gpu():
    assert call_columns(stub_config(), "cpu") == CALL == call_columns(_EIGHT_HEADS, "cuda")


_EIGHT_HEADS = LlamaConfig(num_attention_heads=32, num_key_value_heads=8, hidden_size=4096)
