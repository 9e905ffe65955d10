"""`smartspec profile --operators`: from a config alone."""

import json

import pytest
from transformers import GPT2Config, LlamaConfig, MixtralConfig

from hf_smartspec.commands.main import main
from hf_smartspec.goodput import LayerSizes, Roofline

LLAMA2 = LlamaConfig(
    hidden_size=4096, num_attention_heads=32, intermediate_size=11008, num_hidden_layers=32, dtype="float16"
)


def test_the_paper_s_model_and_device(tmp_path, capsys):
    """Section 3.2.1: Llama 2 7 B at batch size 8 on an Ascend 910B4, 422 tokens, which the paper rounds to 435."""
    LLAMA2.save_pretrained(tmp_path)
    command = f"profile {tmp_path} --operators 280e12,0.8e12 --lengths 1 52 --json {tmp_path / 'report.json'}"
    assert main(command.split()) == 0
    out, report = capsys.readouterr().out, json.loads((tmp_path / "report.json").read_text())
    assert "Z = W_2 SiLU(Y W_1)" in out and "Up to 422 tokens, 53 a row" in out
    assert report["layer"] == LayerSizes(4096, 32, 32, 128, 11008, mlp_matrices=3)._asdict()
    assert (report["layers"], report["bytes_per_number"], report["operators"][0]["limit"]) == (32, 2, 16)
    (first, last), roofline = report["forwards"][:2], Roofline(280e12, 0.8e12)
    layer = LayerSizes(**report["layer"]).operators(8, 52, 1024)
    assert last["attention"] == pytest.approx(32 * layer[3].seconds(roofline))
    assert last["products"] == pytest.approx(32 * sum(layer[place].seconds(roofline) for place in (0, 1, 2, 4, 5)))
    assert first["products"] < last["products"] < 1.2 * first["products"]


def test_layers_of_another_kind(tmp_path, capsys):
    GPT2Config(n_embd=64, n_head=4, n_layer=2).save_pretrained(tmp_path)
    assert main(["profile", str(tmp_path), "--operators", "1e12,1e12", "--dtype", "float32"]) == 0
    assert "wait for memory" not in capsys.readouterr().out
    MixtralConfig(hidden_size=32, num_attention_heads=4, intermediate_size=48).save_pretrained(tmp_path)
    for speeds, message in (
        ("1e12,1e12", "not those of a dense decoder"),
        ("1e12", "--operators"),
        ("0,1", "positive"),
    ):
        with pytest.raises(SystemExit):
            main(["profile", str(tmp_path), "--operators", speeds])
        assert message in capsys.readouterr().err
