"""The training script, run through its own entry point on made-up rows."""

import json
import shutil
import signal
import sys
from itertools import count, islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.models import RECURRENT, new_model

DEMOS = Path(__file__).resolve().parents[2] / "demos"
TINY = ["--vocab-size", "320", "--block", "128", "--target-batch-tokens", "256", "--draft-batch-tokens", "256"]
TINY += ["--target-shape", "16", "2", "4", "2", "32", "--draft-shape", "8", "1", "2", "1", "16"]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(DEMOS))
    import train_models

    yield train_models
    for name in [name for name in sys.modules if name == "train_models" or name.split(".")[0] == "training"]:
        del sys.modules[name]


@pytest.fixture
def data(tmp_path, script) -> Path:
    """Ten training questions and two held-out ones in each of two files, and one file that is not to be read."""
    from training.corpus import is_heldout

    folder = tmp_path / "data"
    folder.mkdir()
    ids = [f"q{i}" for i in range(1000)]
    learnt = list(islice((i for i in ids if not is_heldout(i)), 10))
    heldout = list(islice((i for i in ids if is_heldout(i)), 2))
    math, chat = [], []
    for i, group in enumerate(learnt + heldout):
        math.append({"id": group, "prompt": f"What is {i} plus {i}?", "response": f"{i} + {i} = {2 * i}\n#### {2 * i}"})
        turns = [("user", f"Hello {i}"), ("assistant", "Hi."), ("user", f"Is {i} even?"), ("assistant", "Maybe.")]
        chat.append(
            {
                "id": f"{group}#chat",
                "prompt": turns[2][1],
                "response": turns[3][1],
                "turns": [{"role": role, "content": content} for role, content in turns],
            }
        )
    for name, rows in {"gsm8k": math, "instruct_en_oasst1_val": chat, "unknown": math}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def run(script, data, tmp_path):
    """Call the script with tiny shapes; keyword-free arguments are appended to the command line."""

    def run(*arguments: str) -> int:
        places = ["--data", data, "--output", tmp_path / "models", "--work", tmp_path / "work"]
        places += ["--prompts", tmp_path / "prompts.jsonl"]
        return script.main([*map(str, places), *TINY, *arguments])

    return run


def checkpoint(tmp_path: Path, name: str) -> dict:
    return torch.load(tmp_path / "work" / f"{name}.pt", weights_only=True)


def test_all_stages_leave_models_that_the_auto_classes_load(run, tmp_path):
    assert run("--target-steps", "3", "--draft-steps", "3", "--eval-prompts", "2") == 0

    for name in ("target", "draft"):
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "models" / name)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "models" / name)
        assert model.dtype == torch.bfloat16
        assert model.generation_config.eos_token_id == tokenizer.eos_token_id
        assert model.generation_config.pad_token_id == tokenizer.pad_token_id
        assert not model.generation_config.do_sample
        assert tokenizer.padding_side == "left"
        inputs = tokenizer(["<|user|>What is 1?<|assistant|>", "<|user|>Hi<|assistant|>"], padding=True)
        output = model.generate(torch.tensor(inputs["input_ids"]), max_new_tokens=3)
        assert output.shape[0] == 2

    results = json.loads((tmp_path / "models" / "results.json").read_text())
    assert results["target"]["steps"] == results["draft"]["steps"] == 3
    assert set(results["target"]["heldout_loss"]) == {"math", "chat"}
    assert results["first_token_acceptance"]["all"]["prompts"] == 4
    assert 0 <= results["first_token_acceptance"]["all"]["acceptance"] <= 1
    prompts = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert [row["category"] for row in prompts] == ["math", "math"]  # the chats have several turns


@pytest.mark.skipif("qwen3_5_text" not in RECURRENT, reason="the release of transformers has no such model")
def test_a_hybrid_is_distilled_from_a_target_with_its_tokenizer_and_embeddings(run, tmp_path):
    shape = ("--target-shape", "16", "4", "4", "2", "32")
    assert run("--stages", "tokenizer", "target", "--target-steps", "1", *shape) == 0
    teacher, hybrid, prompts = tmp_path / "models" / "target", tmp_path / "hybrid", tmp_path / "by_category"
    stages = ("--stages", "tokenizer", "target", "prompts", "--kind", "qwen3_5", "--teacher", str(teacher))
    places = ("--output", str(hybrid), "--work", str(hybrid / "work"), "--prompts", str(prompts), "--num-prompts", "1")
    repeats = ("--repeat", "instruct_en_oasst1_val=0")
    assert run(*stages, *places, *repeats, "--target-steps", "3", "--target-lr", "1e-6", *shape) == 0

    old, new = (AutoModelForCausalLM.from_pretrained(path) for path in (teacher, hybrid / "target"))
    assert new.config.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    close = {"atol": 1e-3, "rtol": 1e-2}
    torch.testing.assert_close(new.lm_head.weight, old.lm_head.weight, **close)
    for before, after in zip(old.model.layers, new.model.layers, strict=True):
        torch.testing.assert_close(after.mlp.state_dict(), before.mlp.state_dict(), **close)
        torch.testing.assert_close(after.input_layernorm.weight + 1, before.input_layernorm.weight, **close)
    texts = [(path / "tokenizer.json").read_text() for path in (teacher, hybrid / "target")]
    assert texts[0] == texts[1]
    assert checkpoint(hybrid, "target")["mix"] == (1, 1)  # 6 batches; a pass has 5 without the chats
    assert {path.name: len(path.read_text().splitlines()) for path in prompts.iterdir()} == {"math.jsonl": 1}


@pytest.mark.skipif("qwen3_5_text" not in RECURRENT, reason="the release of transformers has no such model")
@pytest.mark.parametrize(("old", "new"), [("llama", "qwen3_5_text"), ("qwen3_5_text", "llama"), ("qwen3_5_text",) * 2])
def test_norms_that_are_copied_compute_the_same(script, old, new):
    """Those of Qwen3.5 multiply by 1 + weight."""
    teacher, student = new_model(old), new_model(new, seed=1)
    for name, weight in teacher.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.normal_(weight, mean=1.0, std=0.3)
    script.copy_parts(teacher, student)
    hidden = torch.randn(5, teacher.config.hidden_size)
    torch.testing.assert_close(student.model.norm(hidden), teacher.model.norm(hidden))
    for before, after in zip(teacher.model.layers, student.model.layers, strict=True):
        for name in ("input_layernorm", "post_attention_layernorm"):
            torch.testing.assert_close(getattr(after, name)(hidden), getattr(before, name)(hidden))
        torch.testing.assert_close(after.mlp(hidden), before.mlp(hidden))


def test_training_goes_on_from_saved_models(run, script, tmp_path):
    stages = ("--stages", "tokenizer", "target", "draft")
    assert run(*stages, "--target-steps", "3", "--draft-steps", "3") == 0
    before = {name: load_file(tmp_path / "models" / name / "model.safetensors") for name in ("target", "draft")}
    tokenizer = (tmp_path / "models" / "target" / "tokenizer.json").read_text()

    shutil.rmtree(tmp_path / "work")
    tiny_rates = ("--target-lr", "1e-6", "--draft-lr", "1e-6")
    assert run(*stages, "--continue-saved", "--target-steps", "2", "--draft-steps", "2", *tiny_rates) == 0
    for name, weights in before.items():
        for key, value in load_file(tmp_path / "models" / name / "model.safetensors").items():
            torch.testing.assert_close(value, weights[key], atol=1e-3, rtol=1e-2)
    assert (tmp_path / "models" / "target" / "tokenizer.json").read_text() == tokenizer

    work = AutoTokenizer.from_pretrained(tmp_path / "work" / "tokenizer")
    work.add_tokens(["foreign"])
    work.save_pretrained(tmp_path / "work" / "tokenizer")
    with pytest.raises(ValueError, match="is not the tokenizer of"):
        run(*stages, "--continue-saved", "--target-steps", "9")


def test_suspended_training_does_not_use_up_its_budget(run, tmp_path, monkeypatch):
    from training import loop

    clock, steps = [0.0], count(1)
    real_step = loop.train_step

    def step(*args):
        clock[0] += 1000.0 if next(steps) == 25 else 1.0
        return real_step(*args)

    monkeypatch.setattr(loop.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(loop, "train_step", step)
    assert run("--stages", "tokenizer", "target", "--target-steps", "30", "--target-minutes", "999") == 0
    assert checkpoint(tmp_path, "target")["progress"]["seconds"] < 60


def test_interrupted_training_continues_at_the_saved_step(run, script, tmp_path, monkeypatch):
    from training import loop

    seen, step_numbers = [], count(1)
    real_step = loop.train_step

    def step_with_ctrl_c(model, optimizer, loss_fn, batches):
        seen.append([batch.input_ids.tolist() for batch in batches])
        if next(step_numbers) == 2:
            signal.raise_signal(signal.SIGINT)
        return real_step(model, optimizer, loss_fn, batches)

    monkeypatch.setattr(loop, "train_step", step_with_ctrl_c)
    arguments = ("--stages", "tokenizer", "target", "--target-steps", "5")
    assert run(*arguments) == 130
    assert checkpoint(tmp_path, "target")["progress"]["step"] == 2
    assert not (tmp_path / "models").exists()

    assert run(*arguments) == 0
    assert checkpoint(tmp_path, "target")["progress"]["step"] == 5
    assert len(seen) == 5
    interrupted, weights = list(seen), checkpoint(tmp_path, "target")["model"]

    # The same five steps without an interruption see the same texts and end in the same weights.
    (tmp_path / "work" / "target.pt").unlink()
    seen.clear()
    assert run(*arguments) == 0
    assert seen == interrupted
    torch.testing.assert_close(checkpoint(tmp_path, "target")["model"], weights)


def test_heldout_questions_are_not_in_the_training_part_of_any_file(data, script):
    from training.corpus import load_corpus

    corpus = load_corpus(data)
    assert set(corpus.train) == {"gsm8k", "instruct_en_oasst1_val"}  # only files whose licence is known
    learnt = {example.group for examples in corpus.train.values() for example in examples}
    heldout = {example.group for examples in corpus.heldout.values() for example in examples}
    assert len(learnt) == 10
    assert len(heldout) == 2
    assert not learnt & heldout
    assert set(corpus.heldout) == {"math", "chat"}  # both files hold out the same two questions


def test_question_repeated_in_another_group_is_not_learnt_either(data, script):
    from training.corpus import load_corpus

    question = load_corpus(data).heldout["math"][0].messages[0][1]
    with (data / "gsm8k.jsonl").open("a") as file:
        file.write(json.dumps({"id": "q0#again", "prompt": question, "response": "?"}) + "\n")
    learnt = [e.messages[0][1] for examples in load_corpus(data).train.values() for e in examples]
    assert question not in learnt


def test_encoding_equals_the_chat_template(run, data, tmp_path, script):
    from training.corpus import load_corpus
    from training.tokenizer import encode

    assert run("--stages", "tokenizer") == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "work" / "tokenizer")
    for name, examples in load_corpus(data).train.items():
        messages = [{"role": role, "content": content} for role, content in examples[0].messages]
        ids = tokenizer.apply_chat_template(messages)["input_ids"]
        prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True)["input_ids"]
        encoded = encode(examples[0], tokenizer, max_length=128)
        assert encoded.ids.tolist() == ids
        assert encoded.response_from == len(prompt)
        # Of earlier turns nothing is learnt: they come as rows of their own.
        learnt = tokenizer.decode(encoded.ids[encoded.learn_from :])
        assert learnt.startswith("What is" if name == "gsm8k" else "Is 0 even?")
        assert tokenizer.decode(ids) == tokenizer.apply_chat_template(messages, tokenize=False)


def test_long_conversation_loses_its_oldest_turns_first(run, data, tmp_path, script):
    from training.corpus import load_corpus
    from training.tokenizer import encode

    assert run("--stages", "tokenizer") == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "work" / "tokenizer")
    example = load_corpus(data).train["instruct_en_oasst1_val"][0]
    encoded = encode(example, tokenizer, max_length=20)
    assert tokenizer.decode(encoded.ids).startswith("<|user|>Is 0 even?<|assistant|>")
    assert len(encoded.ids) <= 20
    assert encode(example, tokenizer, max_length=4) is None


def test_schemas_keep_the_tables_of_the_query(script, monkeypatch):
    from training import corpus

    monkeypatch.setattr(corpus, "MAX_SCHEMA_CHARS", 0)
    tables = 'CREATE TABLE "a" (\n  "x" text\n);\nCREATE TABLE "b" (\n  "y" text\n);'
    question = "\n\n-- Using the tables above (database d), write one SQL query.\n-- Question: how many?"
    row = {"prompt": tables + question, "response": "SELECT count(*) FROM B"}
    assert corpus.trim_create_tables(row)["prompt"] == 'CREATE TABLE "b" (\n  "y" text\n);' + question

    head = "Schema:\nTable Name, Field Name, Type, Is Foreign Key, Is Primary Key\n"
    fields = "A, x,  int,  YES\n-, -, -, -, -, -, -\nB, y,   int,  YES\n"
    row = {"prompt": head + fields + "\nQuestion: how many?\nSQL:", "response": "SELECT * FROM B AS Balias0"}
    assert corpus.trim_table_list(row)["prompt"] == head + "B, y, int, YES\n\nQuestion: how many?\nSQL:"


def test_missing_files_and_stages_are_named(script, run, tmp_path):
    with pytest.raises(FileNotFoundError, match="no training file in"):
        script.main(["--data", str(tmp_path)])
    with pytest.raises(FileNotFoundError, match="run the stage `tokenizer` first"):
        run("--stages", "target")


def test_batches_hold_every_row_once_within_the_token_limit(script):
    import numpy as np

    from training.batches import ROUND_LENGTH, group_by_length

    lengths = np.random.default_rng(0).integers(1, 700, size=500)
    order = np.random.default_rng(1).permutation(500)
    batches = group_by_length(lengths, order, batch_tokens=1024)
    assert sorted(np.concatenate(batches)) == sorted(order)
    for batch in batches:
        longest = -(-lengths[batch].max() // ROUND_LENGTH) * ROUND_LENGTH
        assert len(batch) == 1 or len(batch) * longest <= 1024


def test_padding_is_not_predicted_and_changes_no_loss(script):
    import numpy as np
    from transformers import LlamaConfig, LlamaForCausalLM

    from training.batches import collate
    from training.loop import next_token_loss
    from training.tokenizer import Encoded

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    model = LlamaForCausalLM(config)
    rows = [Encoded(np.array(ids, dtype=np.uint16), 2, 3) for ids in ([1, 5, 2, 7, 9], [1, 6, 2, 8, 8, 4, 3])]
    together = collate(rows, pad_id=0)
    assert together.num_predicted == 3 + 5
    assert collate(rows, pad_id=0, response_only=True).num_predicted == 2 + 4
    with torch.no_grad():
        total = next_token_loss(model, together)
        alone = sum(
            -model(torch.tensor([row.ids.tolist()])).logits[0].log_softmax(-1)[i, row.ids[i + 1]]
            for row in rows
            for i in range(1, len(row.ids) - 1)
        )
    torch.testing.assert_close(total, alone)
