"""Published MLP speculators: their files, their logits, and what is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_smartspec.candidates.heads.mlp_speculator import MLPSpeculator, is_speculator_checkpoint

from ...models import new_model, shared_model
from .speculator import NUM_STEPS, logits_along, random_speculator, write


@pytest.fixture
def target():
    return shared_model("llama")


def sizes(target):
    return target.config.hidden_size, target.config.vocab_size


def run(speculator, states, tokens):
    """Logits `[B, steps, vocab]` behind tokens `[B, steps]`."""
    found = []
    for step in range(tokens.shape[1]):
        states, logits = speculator(tokens[:, step], states, step)
        found.append(logits)
    return torch.stack(found, dim=1)


def some_input(target, batch_size):
    generator = torch.Generator().manual_seed(1)
    hidden, vocab = sizes(target)
    states = torch.randn(batch_size, hidden, generator=generator)
    return states, torch.randint(vocab, (batch_size, NUM_STEPS), generator=generator)


@pytest.mark.parametrize("batch_size", [1, 5, 16])
@pytest.mark.parametrize("scales_input", [False, True])
@pytest.mark.parametrize("ties", ["none", "stored once", "stored often"])
def test_logits_are_those_of_the_published_code(target, tmp_path, ties, scales_input, batch_size):
    published = random_speculator(*sizes(target), is_tied=ties != "none")
    write(published, tmp_path, scales_input, ties != "none", ties == "stored often")
    assert is_speculator_checkpoint(str(tmp_path))
    speculator = MLPSpeculator.from_pretrained(tmp_path, target)
    states, tokens = some_input(target, batch_size)
    expected = [logits_along(published, *row, scales_input) for row in zip(states, tokens.tolist())]
    found = run(speculator, states, tokens)
    assert found.shape == (batch_size, NUM_STEPS, target.config.vocab_size)
    torch.testing.assert_close(found, torch.stack([torch.stack(row) for row in expected]), rtol=0, atol=1e-5)
    assert found.std() > 0.5, "of a size at which differences are seen"


@pytest.mark.parametrize("is_tied", [False, True])
def test_what_is_saved_is_loaded(target, tmp_path, is_tied):
    (tmp_path / "first").mkdir()
    write(random_speculator(*sizes(target), is_tied=is_tied), tmp_path / "first", True, is_tied)
    speculator = MLPSpeculator.from_pretrained(tmp_path / "first", target)
    speculator.save_pretrained(tmp_path / "second", base_model_name_or_path="mine")
    found = MLPSpeculator.from_pretrained(tmp_path / "second", target)
    states, tokens = some_input(target, 2)
    assert torch.equal(run(found, states, tokens), run(speculator, states, tokens))
    config = json.loads((tmp_path / "second" / "config.json").read_text())
    assert config["tie_weights"] == is_tied and config["base_model_name_or_path"] == "mine"
    assert len(load_file(tmp_path / "second" / "model.safetensors")) == (6 if is_tied else 5 * NUM_STEPS)


def test_dtype_is_the_targets(tmp_path):
    target = new_model("llama").bfloat16()
    write(random_speculator(*sizes(target)), tmp_path)
    speculator = MLPSpeculator.from_pretrained(tmp_path, target)
    assert speculator.dtype == torch.bfloat16 and {item.dtype for item in speculator.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("change", ["hidden", "vocab"])
def test_speculators_of_other_targets_are_refused_with_both_shapes(target, tmp_path, change):
    hidden, vocab = sizes(target)
    write(random_speculator(hidden + 8 * (change == "hidden"), vocab + 5 * (change == "vocab")), tmp_path)
    wrong = (
        rf"\(24, {hidden + 8}\).*hidden size {hidden}" if change == "hidden" else rf"{vocab + 5}, 24.*{vocab} tokens"
    )
    with pytest.raises(ValueError, match=wrong):
        MLPSpeculator.from_pretrained(tmp_path, target)


@pytest.mark.parametrize("missing", ["speculator.emb.1.weight", "speculator.ln.0.bias", "speculator.head.2.weight"])
def test_what_is_missing_is_noticed(target, tmp_path, missing):
    write(random_speculator(*sizes(target)), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[missing]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"test_what_is_missing.*(of every part|lacks those of others)"):
        MLPSpeculator.from_pretrained(tmp_path, target)


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("speculator.proj.1.weight", torch.full((24, 24), torch.nan), "damaged: 576 of its 576 numbers"),
        ("speculator.proj.1.weight", torch.ones(24, 24, dtype=torch.int8), "quantized .*int8"),
        ("speculator.proj.1.weight_scale", torch.ones(1), "quantized .*weight_scale"),
    ],
)
def test_weights_that_cannot_be_used_are_refused(target, tmp_path, name, tensor, said):
    write(random_speculator(*sizes(target)), tmp_path)
    save_file(load_file(tmp_path / "model.safetensors") | {name: tensor}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"{tmp_path}: .*{said}"):
        MLPSpeculator.from_pretrained(tmp_path, target)


@pytest.mark.parametrize("number", ["3", 3.0, True, None, [3]])
def test_numbers_of_steps_that_are_none_are_refused(target, tmp_path, number):
    write(random_speculator(*sizes(target)), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"n_predict": number}))
    with pytest.raises(ValueError, match="`n_predict` must be a whole number, got"):
        MLPSpeculator.from_pretrained(tmp_path, target)
