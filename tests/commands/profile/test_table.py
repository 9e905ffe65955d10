"""Su et al.'s profiling stage: `smartspec profile --table`, and `policy="table"`, which loads what it keeps."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import hf_smartspec
from hf_smartspec import Engine, SmartSpecConfig
from hf_smartspec.candidates.base import saved_name
from hf_smartspec.commands.common.models import load_model
from hf_smartspec.commands.main import main
from hf_smartspec.commands.profile import lookup
from hf_smartspec.commands.profile.lookup import Profile, Times, long_drafts
from hf_smartspec.goodput import BatchLookupTable, DraftCost, PowerLaw, Stage, StepRows
from hf_smartspec.prepare.sources import resolve
from hf_smartspec.target_model.cost import profiling
from hf_smartspec.target_model.cost.profiling import profile_path
from hf_smartspec.target_model.cost.tables import keep_table, load_table, tables_path

from ...generate.helpers import noisy_copy, prompts, tiny_llama
from ..helpers import call


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setattr(profiling, "HF_HOME", str(tmp_path / "home"))


def test_equation_4_counts_the_correct_tokens_of_one_long_draft():
    """l_i is the length of the beginning that the draft model's own greedy text has in common with the target's."""
    model = tiny_llama(eos_token_id=None)
    draft, texts = noisy_copy(model, 0.02), [[5, 9, 5, 9], [11], [3, 4, 5, 6, 7, 8]]
    expected = []
    for text in texts:
        ids, limits = torch.tensor([text]), {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
        own, drafted = (item.generate(ids, **limits)[0, len(text) :] for item in (model, draft))
        expected.append(int((own == drafted).long().cumprod(0).sum()))
    assert 0 < sum(expected) < 36, "some tokens are correct, and some are not"
    assert sorted(long_drafts(model, SmartSpecConfig(draft), texts, 2, 12)) == sorted(expected)


def test_equation_12_beside_the_grid():
    """The step takes t_L + s t_S = 0.002 s + 0.02, and l(s) = 0.9 s ** 0.548, as in Figure 2."""
    cells = {s: Times(1.0, 0.002 * s + 0.02) for s in range(9)}
    profile = Profile(BatchLookupTable({1: 0}), {1: cells}, [], PowerLaw(0.9, 0.548))
    lengths = np.linspace(0.1, 60, 60_000)
    best = lengths[np.argmin((0.002 * lengths + 0.02) / (0.9 * lengths**0.548 + 1))]
    assert profile.modelled()[1] == pytest.approx(best, abs=0.01)


def test_the_command_measures_and_keeps_a_table_that_calls_load(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("hf_smartspec.commands.profile.command.DESIGN", profiling.DESIGN[:5])
    monkeypatch.setattr("hf_smartspec.commands.profile.command.HELD_OUT", profiling.DESIGN[:2])
    (tmp_path / "prompts.txt").write_text("to be or not\nthe quick brown fox\n")
    limits = "--max-batch-size 2 --max-length 1 --max-new-tokens 4 --long-draft 6 --device cpu --dtype float32".split()
    paths = ["--table", str(tmp_path / "prompts.txt"), "--json", str(tmp_path / "out.json")]
    assert main(["profile", str(folder / "target"), *paths, "--assistant", str(folder / "draft"), *limits]) == 0
    printed = capsys.readouterr().out
    assert "best length" in printed and "correct tokens l(s)" in printed and 'policy="table"' in printed
    report = json.loads((tmp_path / "out.json").read_text())["table"]
    name = f"draft_model ({(folder / 'draft').resolve()})"
    assert report["source"] == name and list(report["grid"]) == ["1", "2"]
    assert len(report["correct"]) == 6 and report["correct"] == sorted(report["correct"])
    for size, cells in report["grid"].items():
        per_token = {int(length): times["per_token"] for length, times in cells.items()}
        assert report["lengths"][size] == min(per_token, key=per_token.__getitem__)
    kept = json.loads(Path(report["file"]).read_text())
    assert kept == {name: report["lengths"]}


def test_small_batches_are_measured_with_several_prompts(monkeypatch):
    served = []

    def decoded(model, config, prompts, size, length, new):
        served.append((size, length, prompts[:size]))
        return Times(0.1 * len(prompts[0]), 0.1)

    monkeypatch.setattr(lookup, "decode_batch", decoded)
    monkeypatch.setattr(lookup, "long_drafts", lambda *_: [1, 2])
    texts = [[5] * num for num in (1, 2, 3)]
    found = lookup.measure_table(None, None, texts, 2, 1, 8, 4)
    assert served[1:4] == [(1, 0, texts[:1]), (1, 0, texts[1:2]), (1, 0, texts[2:])], "the first one warms up"
    assert found.grid[1][0].per_token == pytest.approx(0.2)
    assert [rows for size, length, rows in served if (size, length) == (2, 1)] == [texts[:2], [texts[2], texts[0]]]


def test_a_policy_by_name_is_the_table_of_model_machine_and_source(caplog):
    model = tiny_llama(eos_token_id=None)
    batch, limits = prompts((9, 5, 12)), {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    plain, config = model.generate(**batch, **limits), SmartSpecConfig("prompt_lookup", policy="table")
    with hf_smartspec.enabled(model):
        with pytest.raises(ValueError, match=r"no look-up table for drafts of .prompt_lookup..*profile MODEL --table"):
            model.generate(**batch, **limits, assistant=config)
        keep_table(model, "suffix", BatchLookupTable({1: 1}))
        with pytest.raises(ValueError, match="there are some for suffix"):
            Engine(model, config)
        path = keep_table(model, "prompt_lookup", BatchLookupTable({1: 5, 4: 2}))
        assert path == tables_path(model) and path.parent == profile_path(model).parent
        output = model.generate(**batch, **limits, assistant=config, return_dict_in_generate=True)
        assert torch.equal(output.sequences, plain) and output.statistics.drafted_tokens > 0
        found = load_table(model, "prompt_lookup")
        assert found.lengths == {1: 5, 4: 2} and load_table(model, "suffix").lengths == {1: 1}
        rows = StepRows([0, 1], np.zeros(2), np.full(2, 9), stages=[Stage(DraftCost(), np.full(2, 9))])
        assert found.max_nodes(rows, rows.stages[0], []).tolist() == [2, 2]
        engine = Engine(model, config)
        assert engine._policy.policy.lengths == {1: 5, 4: 2}


def test_each_draft_model_has_a_table_of_its_own(folder, tmp_path, monkeypatch):
    """By where it was loaded from, however the folder is named."""
    target = load_model(str(folder / "target"))
    shutil.copytree(folder / "draft", tmp_path / "other" / "draft")
    monkeypatch.chdir(folder)
    drafts = [load_model(str(path)) for path in (folder / "draft", tmp_path / "other/draft", "draft")]
    names = [saved_name(resolve(SmartSpecConfig(draft), target).source) for draft in drafts]
    assert names[0] == names[2] != names[1]
    for name, length in zip(names[:2], (3, 5)):
        keep_table(target, name, BatchLookupTable({1: length}))
    for draft, length in zip(drafts, (3, 5, 3)):
        policy = resolve(SmartSpecConfig(draft, policy="table"), target).config.policy
        assert policy.lengths == {1: length}
    both = resolve(SmartSpecConfig(["suffix", drafts[1]]), target).source
    assert saved_name(both) == f"suffix + {names[1]}"
    with pytest.raises(ValueError, match="no look-up table for drafts of 'suffix"):
        resolve(SmartSpecConfig(["suffix", drafts[1]], policy="table"), target)


def test_the_time_between_two_tokens_needs_two_tokens(folder, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("to be or not\n")
    asked = ["profile", folder / "target", "--table", tmp_path / "prompts.txt", "--max-new-tokens", "1"]
    assert call(*asked) == 2
    assert "--max-new-tokens: with --table" in capsys.readouterr().err


@pytest.mark.parametrize("policy", ["tables", ""])
def test_other_names_of_policies_are_refused(policy):
    with pytest.raises(ValueError, match="must be a LengthPolicy, 'table'"):
        SmartSpecConfig("suffix", policy=policy)
