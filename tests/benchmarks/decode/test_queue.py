"""`python -m benchmarks queue`: run end to end on a tiny model, and what it does where a method fails."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from benchmarks.kit import ways
from hf_smartspec.commands import main as cli
from hf_smartspec.commands.common.runs import up_to_end
from hf_smartspec.goodput import BatchLookupTable
from hf_smartspec.target_model.cost import profiling
from hf_smartspec.target_model.cost.tables import keep_table
from tests.folders import save_tiny_models

from ...covering import exhaustive
from .. import helpers

STATIC, CONTINUOUS = "transformers, static batches", "transformers, generate_batch"
TINY = ["--dtype", "float32", "--device", "cpu", "--max-new-tokens", "12", "--max-batch-size", "3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder whose target has several end-of-sequence tokens, some of which it generates."""
    folder = save_tiny_models(tmp_path_factory.mktemp("models"))
    rows = [{"prompt": f"{n} and {n} and" + " so on" * (n % 3), "response": f" {n}."} for n in range(8)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = AutoModelForCausalLM.from_pretrained(folder / "target")
    model.generation_config.eos_token_id = [1, *range(10, 258, 10)]
    model.save_pretrained(folder / "target")
    return folder


def call(folder, *arguments):
    model = "--model", folder / "target"
    return helpers.bench("queue", folder / "data.jsonl", *model, *TINY, *arguments)


def test_all_methods_agree_in_float32(folder, tmp_path, capsys):
    sources = ["none", "draft", "prompt_lookup", "suffix"]
    asked = ["--draft", folder / "draft", "--assistant", *sources, "--repetitions", "1"]
    assert call(folder, *asked, "--json", tmp_path / "queue.json") == 0
    methods = json.loads((tmp_path / "queue.json").read_text())["results"]["queue"]
    assert list(methods) == [STATIC, CONTINUOUS, *(f"engine, {name}" for name in sources)]
    assert len({tuple(row["checksums"]) for row in methods.values()}) == 1
    (num_tokens,) = {row["tokens"] for row in methods.values()}
    assert 8 < num_tokens < 8 * 12, "some outputs end with an end-of-sequence token, and others are cut"
    for row in methods.values():
        assert row["tokens_per_second"] == pytest.approx(num_tokens / row["seconds"])
    out = capsys.readouterr().out
    assert "8 prompts" in out and out.count("8 / 8") == len(methods)


def test_static_batches_have_drafts_of_fixed_lengths_and_by_the_table(folder, tmp_path, capsys, monkeypatch):
    """Su et al., section 5.3: none, s = 2, and the length that the table has for the batch's size."""
    model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    asked = ["--skip", "continuous", "--assistant", "none", "--static", "draft", "--draft", folder / "draft"]
    monkeypatch.setattr(profiling, "HF_HOME", str(tmp_path / "home"))
    lengths, path = ["none", "k=2", "table"], tmp_path / "queue.json"
    assert call(folder, *asked, "--lengths", "table") == 2
    assert "no look-up table for drafts of 'draft_model" in capsys.readouterr().err
    keep_table(model, f"draft_model ({(folder / 'draft').resolve()})", BatchLookupTable({1: 3, 2: 1}))
    assert call(folder, *asked, "--lengths", *lengths, "--json", path) == 0
    methods = json.loads(path.read_text())["results"]["queue"]
    assert list(methods) == [STATIC, *(f"static batches, draft, {length}" for length in lengths), "engine, none"]
    assert len({tuple(row["checksums"]) for row in methods.values()}) == 1
    assert call(folder, "--static", "draft", "--lengths", "k=two") == 2


def test_recorded_responses_of_all_lengths(folder, tmp_path):
    """The target says what was recorded, or, in transformers' continuous batches, as much."""
    path = tmp_path / "queue.json"
    assert call(folder, "--replay", "--remember", "2", "--assistant", "none", "auto", "--json", path) == 0
    methods = json.loads(path.read_text())["results"]["queue"]
    numbers = {name: row["tokens"] for name, row in methods.items()}
    assert len(set(numbers.values())) == 1 and numbers[STATIC] < 6 * 12
    checksums = {tuple(row["checksums"]) for name, row in methods.items() if name != CONTINUOUS}
    assert len(checksums) == 1 and len(checksums.pop()) == 6


def test_queues_are_served_in_the_order_of_the_seed(folder, tmp_path, monkeypatch):
    served = []

    def noted(name, setup, queue):
        served.append([prompt.tolist() for prompt in queue])
        return [[5]] * len(queue)

    monkeypatch.setattr(ways, "_engine", noted)
    asked = ["--skip", "static", "continuous", "--assistant", "none"]
    for seed in ("1", "1", "2"):
        assert call(folder, *asked, "--seed", seed) == 0
    queues = [queue for queue in served if len(queue) == 8]
    assert queues[0] == queues[1] != queues[2] and sorted(queues[0]) == sorted(queues[2]) != queues[0]


def test_transformers_methods_can_be_left_out(folder, tmp_path):
    path = tmp_path / "queue.json"
    assert call(folder, "--skip", "static", "continuous", "--assistant", "none", "--json", path) == 0
    assert list(json.loads(path.read_text())["results"]["queue"]) == ["engine, none"]


def test_outputs_end_with_the_first_of_several_ends():
    assert up_to_end([5, 8, 9, 7, 0], {7, 9}) == [5, 8, 9]
    assert up_to_end([5, 8], {7, 9}) == [5, 8] and up_to_end([5, 8], set()) == [5, 8]


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([], "generate_batch served 0 of 3 prompts;"),
        ([None, "out of memory", None], "generate_batch served 2 of 3 prompts (out of memory);"),
        *exhaustive(
            ([None, None], "generate_batch served 2 of 3 prompts;"),
            ([None, None, ""], "generate_batch served 2 of 3 prompts"),
        ),
    ],
)
def test_requests_that_transformers_loses_are_an_error(folder, capsys, monkeypatch, outputs, message):
    found = {str(index): SimpleNamespace(generated_tokens=[5], error=error) for index, error in enumerate(outputs)}
    monkeypatch.setattr(LlamaForCausalLM, "generate_batch", lambda self, *_, **__: found)
    assert call(folder, "--assistant", "none") == 2
    err = capsys.readouterr().err
    assert message in " ".join(err.split()) and "--skip continuous" in err and err.count("\n") == 1


def test_interrupted_shows_what_was_measured(folder, tmp_path, monkeypatch):
    served = []

    def interrupt(self, queue, **_):
        if len(served) == 1:  # after the warm-up
            raise KeyboardInterrupt
        served.append(queue)
        return {str(index): SimpleNamespace(generated_tokens=[5], error=None) for index in range(len(queue))}

    monkeypatch.setattr(LlamaForCausalLM, "generate_batch", interrupt)
    path = tmp_path / "queue.json"
    assert call(folder, "--assistant", "none", "--json", path) == cli.INTERRUPTED
    assert list(json.loads(path.read_text())["results"]["queue"]) == [STATIC]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--assistant", "draft"], "--assistant: draft needs --draft"),
        (["--repetitions", "0"], "at least 1"),
        (["--max-new-tokens", "300"], "leave no room for a prompt"),
        (["--json", "/nowhere/queue.json"], "no such folder"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(folder, capsys, arguments, message):
    assert call(folder, *arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
