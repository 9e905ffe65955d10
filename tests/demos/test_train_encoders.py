"""The script that trains the pair with encoders, on made-up rows, and the command that such a pair is for."""

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from tests.benchmarks.helpers import bench
from tests.folders import save_tiny_models

pytestmark = pytest.mark.end_to_end
DEMOS = Path(__file__).resolve().parents[2] / "demos"
SHAPES = ["--target-shape", "16", "2", "2", "32", "--draft-shape", "8", "1", "2", "16"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`gsm8k.jsonl`, and what the script made of it."""
    folder = save_tiny_models(tmp_path_factory.mktemp("models"))
    rows = [{"id": f"q{n}", "prompt": f"What is {n}?", "response": f"It is {n}."} for n in range(60)]
    (folder / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DEMOS))
        import train_encoders

        places = ["--data", folder, "--decoder", folder / "target", "--output", folder, "--work", folder / "work"]
        arguments = [*map(str, places), *SHAPES, "--steps", "3", "--draft-steps", "2", "--batch-size", "4"]
        assert train_encoders.main([*arguments, "--threads", "1"]) == 0
        for name in [
            name for name in sys.modules if name.split(".")[0] in ("train_encoders", "train_models", "training")
        ]:
            del sys.modules[name]
    return folder


def test_models_answer_and_share_their_vocabulary(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder / "t5_target")
    assert tokenizer.chat_template is None
    ids = tokenizer("What is 7?", return_tensors="pt").input_ids
    for name, hidden in (("t5_target", 16), ("t5_draft", 8)):
        model = AutoModelForSeq2SeqLM.from_pretrained(folder / name)
        assert model.config.d_model == hidden and model.dtype == torch.bfloat16
        output = model.generate(ids, max_new_tokens=4)
        assert output[0, 0] == tokenizer.pad_token_id and output.shape[1] > 1


def test_draft_models_behind_encoders_are_measured_offline_and_online(folder, tmp_path, capsys):
    out = tmp_path / "results.json"
    rows = [{"prompt": f"Say {n} and {n * n}"} for n in range(12)]
    (folder / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--model", folder / "t5_target", "--draft", folder / "t5_draft", "--base", folder / "gsm8k.jsonl"]
    arguments += ["--requests", "8", "--test", "2", "--interval", "4", "--max-new-tokens", "6", "--dtype", "float32"]
    asked = [folder / "asked.jsonl", *arguments, "--json", out]
    assert bench("online", *asked, "--parts", "table", "online") in (0, 1), "learning may bring nothing"
    report = json.loads(out.read_text())
    assert not report["failures"]
    parts = {part: rows[part] for part, rows in report["results"].items()}
    assert all(0 <= rate <= 1 for rate in parts["table"]["rows"]["asked"].values())
    assert parts["online"]["rows"]["asked"]["learning"]["updates"] == 2
    assert bench("online", *asked, "--parts", "speed") == 2
    assert "encoder-decoders have the replayed parts only" in capsys.readouterr().err
