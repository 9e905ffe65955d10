"""`python -m benchmarks rollouts` on a tiny policy: what it measures, what it compares, and what it refuses."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("trl")

import hf_smartspec
from benchmarks.decode.rollouts import command, runs
from benchmarks.decode.rollouts.runs import PairedRollouts, Run, arithmetic
from hf_smartspec.commands.common.cost_matched import copy_weights, enlarge
from tests.covering import exhaustive

from ... import helpers

SHORT = ["--device", "cpu", "--threads", "1", "--max-new-tokens", "8", "--generations", "2", "--epochs", "2"]

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of names that TRL still uses
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def problems(folder):
    path = folder / "problems.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n} + {n} ="}) + "\n" for n in range(4)))
    return path


def call(folder, problems, *arguments):
    names = ["--assistants", "suffix", f"online:{folder / 'draft'}"]
    return helpers.bench(
        "rollouts", problems, "--model", folder / "target", "--num-prompts", "2", *SHORT, *names, *arguments
    )


@pytest.mark.end_to_end
@pytest.mark.parametrize("size", ["0", *exhaustive(["300000"])])
def test_training_is_the_same_with_every_assistant(folder, problems, tmp_path, capsys, size):
    out = tmp_path / "results.json"
    assert call(folder, problems, "--parameters", size, "--json", out) == 0
    rows = json.loads(out.read_text())["results"]["rollouts"]
    assert list(rows) == ["none", "suffix", "draft, online"]
    for row in rows.values():
        assert row["same_completions"] and row["digest"] == rows["none"]["digest"]
        assert row["losses"] == rows["none"]["losses"]
        assert len(row["epochs"]) == 2 and len(row["losses"]) == 4 and min(row["ratio"], row["ratio_to_own"]) > 0
    assert rows["none"]["tokens_per_step"] == 1 and rows["draft, online"]["tokens_per_step"] > 1
    assert rows["draft, online"]["learning"]["draft"]["updates"] > 0
    printed = capsys.readouterr().out
    assert "draft, online: completions, losses and weights are those without" in printed


def test_what_changes_training_is_found(folder, problems, monkeypatch, capsys):
    """Weights that are changed without the trainer, in one of the runs."""
    end = PairedRollouts.end

    def disturbed(rollouts):
        end(rollouts)
        if rollouts.assistant == "suffix":
            with torch.no_grad():
                next(rollouts.policy.parameters()).view(-1)[0] += 1e-3

    monkeypatch.setattr(PairedRollouts, "end", disturbed)
    assert call(folder, problems, "--parameters", "0", "--assistants", "suffix") == 1
    assert "NO  suffix" in capsys.readouterr().out


def test_completions_that_differ_are_found(folder):
    policy, run = AutoModelForCausalLM.from_pretrained(folder / "target"), Run()
    rollouts = PairedRollouts(run, policy, None, "suffix")
    inputs = {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    options = {"max_new_tokens": 6, "do_sample": True, "eos_token_id": None}
    texts = policy.generate(**inputs, **options)
    generate = rollouts._generate

    def wrong(*args, assistant, **kwargs):
        found = generate(*args, assistant=assistant, **kwargs)
        return found + (assistant == "suffix")

    rollouts._generate = wrong
    policy.generate(**inputs, **options)
    rollouts.end()
    assert [item.is_same for item in run.rollouts] == [True, False]
    assert run.rollouts[0].lengths == [6] and texts.shape == (1, 9)
    assert not isinstance(policy.generate, PairedRollouts)
    hf_smartspec.disable(policy)


def test_an_enlarged_model_learns_what_the_small_one_has_learnt(folder):
    policy = AutoModelForCausalLM.from_pretrained(folder / "target")
    large, ids = enlarge(policy, 300_000), torch.arange(3, 20)[None]
    with torch.no_grad():
        before = large(ids).logits
        for parameter in policy.parameters():
            parameter.mul_(1.1)
        copy_weights(policy, large)
        assert torch.allclose(large(ids).logits, policy(ids).logits, atol=1e-4)
        assert not torch.allclose(large(ids).logits, before, atol=1e-2)


def test_right_sums_and_the_form_of_the_answer_are_rewarded():
    texts = ["<<3*4=12>>12\n#### 12", "<<3*4=13>>13 <<1+1=2>>2", [{"role": "assistant", "content": "#### 5"}], ""]
    assert arithmetic(texts) == [1.5, 0.5, 0.5, 0.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--generations", "1"], "--generations"),
        (["--prompts-per-step", "3"], "--prompts-per-step"),
        (["--quantize", "int8"], "--quantize"),
        (["--assistants", "online:suffix"], "--assistants"),
        (["--assistants", "missing/folder/here"], "no such model folder"),
    ],
)
def test_what_cannot_be_measured_is_refused(folder, problems, capsys, arguments, message):
    assert call(folder, problems, "--parameters", "0", *arguments) == 2
    assert message in capsys.readouterr().err


def test_without_trl_it_says_what_to_install(folder, problems, monkeypatch, capsys):
    monkeypatch.setattr(runs.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(command, "load_model", None)  # before any work
    assert call(folder, problems) == 2
    assert "hf-smartspec[rl]" in capsys.readouterr().err
