"""`smartspec train` from files to a folder that drafts."""

import json
import signal
from itertools import count

import pytest
import torch

import hf_smartspec
from hf_smartspec import Engine
from hf_smartspec.commands.main import main
from hf_smartspec.training.blocks import BlockTraining
from hf_smartspec.training.draft import DraftTraining
from hf_smartspec.training.eagle import EagleTraining
from hf_smartspec.training.medusa import MedusaTraining

from ...covering import part_of
from ...generate.helpers import tiny_llama, tiny_tokenizer
from ...models import new_model


def tied_llama():
    """With one matrix as embeddings and head, as small models have it."""
    return tiny_llama(tie_word_embeddings=True)


@pytest.fixture
def target(tmp_path):
    model = tied_llama()
    folder = tmp_path / "target"
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.jsonl"
    prompts = ["abc"[: 1 + number % 3] + "xyz"[number % 3] + "b" * number for number in range(12)]
    rows = [{"prompt": prompt, "response": "abcabcabcabc" * 2} for prompt in prompts]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


KINDS = {
    "medusa": ["--num-heads", "2"],
    "eagle3": ["--num-heads", "2", "--draft-vocab-size", "20", "--neurons", "24"],
    "draft": ["--num-layers", "1"],
    "dflash": ["--num-layers", "1", "--block-size", "3", "--num-blocks", "4", "--draft-vocab-size", "20"],
    "dspark": ["--num-layers", "1", "--block-size", "2", "--markov-head", "gated", "--dtype", "bfloat16"],
}
BLOCKS = ("dflash", "dspark")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [[], ["--own-outputs", "12"]], ids=["texts", "answers"])
def test_drafters_that_draft(target, texts, tmp_path, capsys, kind, options):
    output = tmp_path / "heads"
    figures = tmp_path / "figures.json"
    arguments = ["train", str(target), str(texts), "--kind", kind, *KINDS[kind], *options, "--output", str(output)]
    status = main([*arguments, "--steps", "20", "--json", str(figures)])
    said = capsys.readouterr().out
    num_tokens = 1 if kind == "draft" else 2
    places = "of the block" if kind in BLOCKS else "next token" if kind == "draft" else "after the next token"
    assert status == 0 and f"{num_tokens} {places}" in said
    assert str(output) in said
    report = json.loads(figures.read_text())
    assert len(report["accuracy"]) == num_tokens and report["held_out"] >= 1
    if kind in BLOCKS:
        assert f"Of a block, {report['accepted_length']:.2f} of 2 drafted tokens are accepted." in said
    card = (output / "README.md").read_text()
    assert f"| {report['learnt']}, with " in card and "| updates | 20 of 8 texts of up to 512 tokens: " in card
    assert f"- {kind}" in card and f"{report['accuracy'][-1]['1']:.1%}" in card and "base_model" not in card
    model = hf_smartspec.enable(tied_llama())
    ids = torch.tensor([[5, 6, 7]])
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)
    found = model.generate(ids, max_new_tokens=12, do_sample=False, assistant=str(output), return_dict_in_generate=True)
    assert torch.equal(found.sequences, expected) and found.statistics.drafted_tokens > 0
    with Engine(model, assistant=str(output)) as engine:
        (served,) = engine.generate(ids.tolist(), max_new_tokens=12, do_sample=False)
    assert served.generated_tokens == expected[0, 3:].tolist() and served.statistics.drafted_tokens > 0


def status_of(arguments):
    try:
        return main(arguments)
    except SystemExit as error:
        return error.code


@pytest.mark.parametrize("kind", part_of(KINDS, "medusa"))
def test_ctrl_c_keeps_a_checkpoint_that_training_goes_on_from(target, texts, tmp_path, capsys, monkeypatch, kind):
    steps = count(1)
    kinds = {"draft": DraftTraining, "medusa": MedusaTraining, "eagle3": EagleTraining}
    training = kinds.get(kind, BlockTraining)
    forward = training.forward

    def interrupted(self, input_ids, labels):
        if next(steps) == 3:
            signal.raise_signal(signal.SIGINT)
        return forward(self, input_ids, labels)

    arguments = ["train", str(target), str(texts), "--kind", kind, *KINDS[kind], "--output", str(tmp_path / "out")]
    arguments += ["--steps", "6"]
    monkeypatch.setattr(training, "forward", interrupted)
    assert main(arguments) == 130
    captured = capsys.readouterr()
    assert "Kept at step 3 of 6: --resume goes on there." in captured.out and "interrupted" in captured.err
    assert main([*arguments, "--resume"]) == 0
    assert "Going on at step 3 of 6." in capsys.readouterr().out and next(steps) == 3 + 3 + 1
    assert main([*arguments, "--resume"]) == 0
    assert "Going on at step 6 of 6." in capsys.readouterr().out and next(steps) == 3 + 3 + 2


def test_nothing_of_somebody_else_is_overwritten(target, texts, tmp_path, capsys):
    """Neither a model nor another training's checkpoints."""
    config = (target / "config.json").read_text()
    assert status_of(["train", str(target), str(texts), "--output", str(target), "--steps", "2"]) == 2
    assert "holds another model" in capsys.readouterr().err and (target / "config.json").read_text() == config
    arguments = ["train", str(target), str(texts), "--output", str(tmp_path / "heads"), "--steps", "2"]
    assert status_of(arguments) == 0
    assert status_of(arguments) == 2 and "--resume" in capsys.readouterr().err
    assert status_of([*arguments, "--resume", "--num-heads", "2"]) == 2
    assert "num_heads was '4'" in capsys.readouterr().err
    assert status_of([*arguments, "--resume"]) == 0


def test_targets_without_padding_answer(target, texts, tmp_path):
    for name in ("config.json", "generation_config.json"):
        content = json.loads((target / name).read_text())
        (target / name).write_text(json.dumps(content | {"pad_token_id": None}))
    arguments = ["--output", str(tmp_path / "heads"), "--steps", "2", "--own-outputs", "8"]
    assert main(["train", str(target), str(texts), *arguments]) == 0


def test_answers_are_kept_for_the_same_target_only(target, texts, tmp_path):
    """Another one may lie in the folder of an earlier one."""
    answers = tmp_path / "answers.json"

    def learnt(number: int) -> dict:
        options = ["--own-outputs", "8", "--answers", str(answers), "--steps", "1"]
        assert main(["train", str(target), str(texts), *options, "--output", str(tmp_path / f"heads {number}")]) == 0
        return json.loads(answers.read_text())

    first = learnt(1)
    known = first | {"responses": [[5, 6, 7]] * len(first["responses"])}
    answers.write_text(json.dumps(known))
    assert learnt(2) == known  # as they are
    other = tied_llama()
    with torch.no_grad():
        other.get_output_embeddings().weight.mul_(-1)
    other.save_pretrained(target)
    assert learnt(3)["responses"] not in (first["responses"], known["responses"])


def test_ctrl_c_keeps_the_answers_that_are_there(target, texts, tmp_path, monkeypatch):
    get_result, asked, num = Engine.get_result, [], count(1)

    def interrupted(engine, name):
        if next(num) == 6:
            raise KeyboardInterrupt
        return get_result(engine, name)

    add_request = Engine.add_request
    monkeypatch.setattr(Engine, "add_request", lambda *args, **kwargs: asked.append(1) or add_request(*args, **kwargs))
    arguments = ["train", str(target), str(texts), "--own-outputs", "8", "--steps", "1"]
    assert main([*arguments, "--output", str(tmp_path / "whole")]) == 0
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "get_result", interrupted)
        assert main([*arguments, "--output", str(tmp_path / "parts")]) == 130
    asked.clear()
    assert main([*arguments, "--output", str(tmp_path / "parts"), "--resume"]) == 0
    whole, parts = (
        json.loads((tmp_path / name / "checkpoints/answers.json").read_text()) for name in ("whole", "parts")
    )
    assert parts == whole and len(asked) == 12 - 5


def test_answers_that_were_cut_are_not_learnt_to_end_there(target, tmp_path, monkeypatch):
    path, seen = tmp_path / "answers.jsonl", []
    ends = {"abc": "stop", "abd": "length"}
    rows = [{"prompt": prompt, "response": "xyz", "finish_reason": reason} for prompt, reason in ends.items()]
    path.write_text("\n".join(map(json.dumps, rows)))

    def refused(texts, *_):
        seen.extend(texts)
        raise ValueError("enough")

    monkeypatch.setattr("hf_smartspec.commands.train.command.split", refused)
    assert status_of(["train", str(target), str(path), "--output", str(tmp_path / "heads")]) == 2
    end = tiny_tokenizer().eos_token_id
    assert [item.response[-1] == end for item in seen] == [True, False] and len(seen[0].response) > len(
        seen[1].response
    )


def test_targets_with_an_encoder_are_refused(texts, tmp_path, capsys):
    folder = tmp_path / "t5"
    new_model("t5").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    assert status_of(["train", str(folder), str(texts), "--output", str(tmp_path / "heads")]) == 2
    assert "has an encoder" in capsys.readouterr().err


def test_draft_models_of_another_vocabulary_do_not_learn(target, texts, tmp_path, capsys):
    folder = tmp_path / "draft"
    new_model("llama").save_pretrained(folder)
    arguments = ["train", str(target), str(texts), "--output", str(tmp_path / "out"), "--kind", "draft"]
    assert status_of([*arguments, "--draft", str(folder)]) == 2
    assert "has a vocabulary of" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"--kind": "eagle9"}, "eagle9"),
        ({"--num-heads": "0"}, "at least 1"),
        ({"--steps": "3", "--minutes": "1"}, "not allowed with argument --steps"),
        ({"--device": "nonsense"}, "nonsense"),
        ({"file": "missing.jsonl"}, "missing.jsonl"),
        ({"model": "./missing"}, "no such model folder: './missing'"),
        ({"--answers": "missing/answers.json", "--own-outputs": "4"}, "no such folder"),
        ({"--answers": "pyproject.toml", "--own-outputs": "4"}, "holds no answers"),
        ({"--answers": "answers.json"}, "goes with --own-outputs"),
        ({"--kind": "draft", "--draft": "./missing"}, "missing"),
        ({"--kind": "dflash", "--draft": "./missing"}, "holds no block drafter"),
        ({"--kind": "dflash", "--block-size": "1"}, "at least 2"),
        ({"--kind": "dflash", "--markov-head": "rnn"}, "--markov-head is of a new DSpark"),
    ],
)
def test_bad_arguments_are_refused_before_any_work(target, texts, tmp_path, capsys, change, match):
    options = [item for name, value in change.items() if name.startswith("--") for item in (name, value)]
    arguments = [change.get("model", str(target)), change.get("file", str(texts)), "--output", str(tmp_path / "out")]
    assert status_of(["train", *arguments, *options]) == 2 and match in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_single_prompt_is_refused_and_leaves_no_folder(target, tmp_path, capsys):
    path, output = tmp_path / "texts.jsonl", tmp_path / "out"
    path.write_text('{"prompt": "a", "response": "b"}\n' * 2)
    assert status_of(["train", str(target), str(path), "--output", str(output)]) == 2
    assert "at least two different prompts" in capsys.readouterr().err and not output.exists()
