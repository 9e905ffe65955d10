"""One command answers questions, trains heads on the answers, and measures them on questions that were held out."""

import json
import sys
from argparse import Namespace
from itertools import count
from pathlib import Path

import pytest

from ..generate.helpers import tiny_llama, tiny_tokenizer

DEMOS = Path(__file__).resolve().parents[2] / "demos"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(DEMOS))
    import train_real_heads

    monkeypatch.setattr(train_real_heads, "BLOCK", 5)
    monkeypatch.setattr(train_real_heads, "MAX_NEW_TOKENS", 12)
    monkeypatch.setattr(train_real_heads, "HELD_OUT_TOKENS", 8)
    monkeypatch.setattr(train_real_heads, "TRAINING", ["--batch-size", "2"])
    sizes = {"eagle3": ["--num-heads", "2"], "dflash": ["--num-layers", "1"]}
    monkeypatch.setattr(train_real_heads, "KINDS", sizes)
    yield train_real_heads
    for name in [name for name in sys.modules if name == "train_real_heads" or name.split(".")[0] == "training"]:
        del sys.modules[name]


@pytest.fixture
def arguments(script, tmp_path) -> list[str]:
    """Twelve questions that are learnt and two that are held out, and a target without an end of text."""
    from training.corpus import is_heldout

    groups: dict[bool, list[str]] = {True: [], False: []}
    for name in (f"q{number}" for number in count()):
        groups[is_heldout(name)].append(name)
        if len(groups[True]) >= 2 and len(groups[False]) >= 12:
            break
    chosen = groups[False][:12] + groups[True][:2]
    rows = [
        {"id": name, "prompt": "abc"[: 1 + place % 3] + "x" * place, "response": "yz"}
        for place, name in enumerate(chosen)
    ]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = tiny_llama(tie_word_embeddings=True, eos_token_id=None)
    model.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    options = {"data": "data", "target": "target", "output": "heads", "work": "work"}
    return [
        *(item for name, path in options.items() for item in (f"--{name}", str(tmp_path / path))),
        "--dtype",
        "float32",
    ]


@pytest.mark.end_to_end
@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_answers_are_kept_and_learnt_from_by_drafters_that_draft(script, arguments, tmp_path, capsys, kind):
    from training.corpus import is_heldout

    arguments += ["--kind", kind]
    assert script.main([*arguments, "--blocks", "1"]) == 0
    printed = capsys.readouterr().out
    accepted = json.loads((tmp_path / "heads" / "accepted.json").read_text())
    assert (
        1 <= accepted["math"] == accepted["all"] <= 1 + script.NUM_NODES and f"math {accepted['math']:.2f}" in printed
    )
    answers = tmp_path / "work" / "target" / "answers-00.jsonl"
    before = answers.read_text()
    rows = [json.loads(line) for line in before.splitlines()]
    assert len(rows) == 5 and all(row["finish_reason"] == "length" for row in rows)

    assert script.main([*arguments, "--blocks", "0"]) == 0
    assert capsys.readouterr().out == printed[printed.index("Tokens per step") :]
    assert script.main([*arguments, "--blocks", "1"]) == 0
    assert "Going on at step" in capsys.readouterr().out and answers.read_text() == before

    further = ["--blocks", "1", "2", "--draft", str(tmp_path / "heads"), "--output", str(tmp_path / "better")]
    assert script.main([*arguments, *further]) == 0
    others = [json.loads(line) for line in (tmp_path / "work" / "target" / "answers-01.jsonl").read_text().splitlines()]
    assert {row["prompt"] for row in others}.isdisjoint(row["prompt"] for row in rows)
    assert not any(is_heldout(row["id"]) for row in rows + others)
    assert (tmp_path / "better" / "model.safetensors").exists()
    for folder in ("heads", "better"):
        card = (tmp_path / folder / "README.md").read_text()
        assert card.count("## Tokens per step") == 1 and "| math | all |" in card


TEMPLATE = (
    "{% for message in messages %}{{ ('x' if message.role == 'user' else 'y') + message.content + 'z' }}{% endfor %}"
    "{% if add_generation_prompt %}y{% endif %}"
)


@pytest.mark.end_to_end
def test_questions_that_the_model_makes_up_are_mixed_with_the_others_and_training_ends_by_the_clock(
    script, arguments, tmp_path, capsys
):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "target")
    tiny_llama(tie_word_embeddings=True).save_pretrained(tmp_path / "target")
    arguments += ["--own-questions", "9", "--minutes", "0.02", "--blocks", "4"]
    assert script.main(arguments) == 0
    printed = capsys.readouterr().out
    work = tmp_path / "work" / "target" / "own-9"
    turns = [row for seed in range(4) for row in script.read(work / f"answers-turns-{seed}.jsonl")]
    ended = {row["response"] for row in turns if row["finish_reason"] == "stop" and row["generated_tokens"] >= 5}
    assert [row["prompt"] for row in turns] == ["x"] * 9 and len({row["response"] for row in turns}) > 1 and ended
    asked = [row for block in range(4) for row in script.read(work / f"answers-{block:02}.jsonl")]
    own = [row["prompt"] for row in asked if row["category"] == "own"]
    assert f"{len(ended)} questions that the model has made up" in printed
    assert set(own) <= ended and own and len(asked) > len(own)
    places = [row["category"] == "own" for row in asked]
    assert places != sorted(places) and places != sorted(places, reverse=True)
    assert script.main(arguments) == 0
    assert "Going on at step" in capsys.readouterr().out


def test_every_task_makes_a_question_of_a_row_and_none_that_is_held_out(script):
    from training.corpus import to_example
    from training.questions import MORE_TASKS, TASKS

    tasks = TASKS + MORE_TASKS
    text = {"prompt": "a python function, as in the cheat sheet\nYour code: f", "response": "def f():\n    pass"}
    examples = {
        name: [to_example({"id": name, **text, "prompt": f"{name}: {text['prompt']}"}, name)]
        for name in {task.file for task in tasks}
    }
    args = Namespace(own_questions=0)
    rows = script.pick(args, examples, [])
    assert sorted(row["category"] for row in rows) == sorted(task.name for task in tasks)
    assert len({row["prompt"] for row in rows}) == len(tasks)
    (in_cpp,) = [row["prompt"] for row in rows if "C++" in row["prompt"]]
    assert in_cpp == "mbpp: a C++ function, as in the cheat sheet Use C++."
    assert script.pick(args, examples, rows[:3]) == rows[3:]


def test_a_model_that_is_not_here_is_named(script, monkeypatch, capsys):
    monkeypatch.setattr(script, "real_model", lambda: None)
    with pytest.raises(SystemExit):
        script.main(["--data", "data", "--output", "heads"])
    assert "make setup" in capsys.readouterr().err
