"""Files of drafters that cannot be used: one sentence with the reason, wherever they are named."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import hf_smartspec
from hf_smartspec.training.eagle import new_heads

from .helpers import call


@pytest.fixture(scope="module")
def model(folder):
    return hf_smartspec.enable(AutoModelForCausalLM.from_pretrained(folder / "target").eval())


def without_norm(folder, path, model):
    shutil.copytree(folder / "draft", path)
    tensors = load_file(path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def in_parallel(folder, path, model):
    new_heads(model).save_pretrained(path, ptd_token_id=0)


def beyond_the_target(folder, path, model):
    new_heads(model).save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [2, 9, 17]}
    (path / "config.json").write_text(json.dumps(config))


REFUSED = {
    without_norm: "lack weights of LlamaForCausalLM, which would be random: model.norm.weight",
    in_parallel: "draft in parallel (P-EAGLE, by 'ptd_token_id'), and have no `mask_hidden`",
    beyond_the_target: "`eagle_config.eagle_aux_hidden_state_layer_ids` is [2, 9, 17], and must be a list of integers",
}


@pytest.mark.parametrize("write", REFUSED)
def test_one_sentence_says_why(folder, model, tmp_path, capsys, write):
    path = tmp_path / "drafter"
    write(folder, path, model)
    inputs = {"input_ids": torch.tensor([[5, 6]]), "max_new_tokens": 4}
    for ask in (
        lambda: model.generate(**inputs, assistant=str(path)),
        lambda: model.generate(**inputs, assistant=["suffix", str(path)]),
        lambda: hf_smartspec.Engine(model, str(path)),
    ):
        with pytest.raises(ValueError) as error:
            ask()
        said = str(error.value)
        assert REFUSED[write] in said and str(path) in said and "\n" not in said
    capsys.readouterr()
    assert call("generate", "ab", "--model", folder / "target", "--assistant", path, "--device", "cpu") == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("smartspec")]
    assert len(lines) == 1 and REFUSED[write] in lines[0], lines


def test_draft_models_of_commands_are_whole_too(folder, model, tmp_path, capsys):
    path = tmp_path / "drafter"
    without_norm(folder, path, model)
    assert call("verify", folder / "target", "--assistant", path, "--device", "cpu") == 2
    err = capsys.readouterr().err
    assert REFUSED[without_norm] in err and "Traceback" not in err


def test_learned_drafters_are_no_draft_models(folder, model, tmp_path, capsys):
    new_heads(model).save_pretrained(tmp_path / "heads")
    asked = ["--model", folder / "target", "--draft", tmp_path / "heads", "--sources", "draft", "--device", "cpu"]
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1 and 1"}\n')
    assert call("bench", "load", tmp_path / "prompts.jsonl", *asked) == 2
    assert "holds a learned drafter, EagleHeads, and no draft model" in capsys.readouterr().err


def test_learned_drafters_do_not_learn_from_keys_apart(folder, model, tmp_path, capsys):
    new_heads(model).save_pretrained(tmp_path / "heads")
    learning = ["--learn", tmp_path / "learnt", "--api-key", "a", "--api-key", "b"]
    assert call("serve", folder / "target", "--draft", tmp_path / "heads", *learning, "--device", "cpu") == 2
    err = " ".join(capsys.readouterr().err.split())
    assert "keys are kept apart by copies of a draft model" in err and "Traceback" not in err
