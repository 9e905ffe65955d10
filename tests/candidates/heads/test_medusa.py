"""Published Medusa heads: their files, their logits, and what is refused."""

import json
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_smartspec import MedusaHeads, quantize
from hf_smartspec.candidates.heads.medusa.heads import is_medusa_checkpoint

from ...models import new_model, shared_model
from .published import LAYOUTS, NUM_HEADS, logits_of, random_heads


@pytest.fixture
def target():
    return shared_model("llama")


def sizes(target):
    return target.config.hidden_size, target.config.vocab_size


@pytest.mark.parametrize("batch_size", [1, 16])
@pytest.mark.parametrize(("num_layers", "has_bias"), [(1, True), (2, True), (1, False)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_those_of_the_published_code(target, tmp_path, layout, num_layers, has_bias, batch_size):
    published = random_heads(*sizes(target), num_layers, has_bias)
    LAYOUTS[layout](published, tmp_path)
    assert is_medusa_checkpoint(str(tmp_path))
    heads = MedusaHeads.from_pretrained(tmp_path, target)
    states = torch.randn(batch_size, target.config.hidden_size, generator=torch.Generator().manual_seed(1))
    logits = heads(states)
    assert heads.num_heads == NUM_HEADS and logits.shape == (batch_size, NUM_HEADS, target.config.vocab_size)
    expected = logits_of(published, states).transpose(0, 1)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    tokens, probs = heads.best(states, 4)
    best = expected.softmax(-1).topk(4)
    assert torch.equal(tokens, best.indices)
    torch.testing.assert_close(probs, best.values)


def test_blocks_may_use_the_targets_own_output(target, tmp_path):
    published = random_heads(*sizes(target))
    LAYOUTS["blocks"](published, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: item for name, item in tensors.items() if "lm_heads" not in name}, tmp_path / "model.safetensors")
    states = torch.randn(2, target.config.hidden_size)
    output = target.get_output_embeddings().weight
    expected = logits_of([(layers, output) for layers, _ in published], states).transpose(0, 1)
    heads = MedusaHeads.from_pretrained(tmp_path, target)
    torch.testing.assert_close(heads(states), expected, rtol=0, atol=1e-5)
    assert heads.outputs[0].data_ptr() == output.data_ptr(), "it is not held twice"


def test_the_targets_own_output_must_be_in_floating_point(tmp_path):
    target = quantize(new_model("llama", tie_word_embeddings=False), "int8")
    LAYOUTS["blocks"](random_heads(*sizes(target)), tmp_path)
    assert MedusaHeads.from_pretrained(tmp_path, target).num_heads == NUM_HEADS
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: item for name, item in tensors.items() if "lm_heads" not in name}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="quantized"):
        MedusaHeads.from_pretrained(tmp_path, target)


@pytest.mark.parametrize("layout", ["pickled", "safetensors"])
def test_a_whole_model_may_lie_beside_the_heads(target, tmp_path, layout):
    published = random_heads(*sizes(target))
    LAYOUTS[layout](published, tmp_path)
    own = {name: torch.zeros_like(item) for name, item in target.state_dict().items()}
    save_file(own | {"lm_head.weight": torch.zeros(sizes(target)[::-1])}, tmp_path / "model.safetensors")
    states = torch.randn(2, target.config.hidden_size)
    expected = logits_of(published, states).transpose(0, 1)
    torch.testing.assert_close(MedusaHeads.from_pretrained(tmp_path, target)(states), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("num_outputs", [1, NUM_HEADS])
@pytest.mark.parametrize("has_ids", [True, False])
def test_what_is_saved_is_loaded(target, tmp_path, num_outputs, has_ids):
    published = random_heads(*sizes(target))
    num = 50 if has_ids else target.config.vocab_size
    outputs = [output[:num].contiguous() for _, output in published[:num_outputs]]
    heads = MedusaHeads([layers for layers, _ in published], outputs, torch.arange(num) + 3 if has_ids else None)
    heads.save_pretrained(tmp_path, base_model_name_or_path="mine")
    found = MedusaHeads.from_pretrained(tmp_path, target)
    states = torch.randn(2, target.config.hidden_size)
    assert torch.equal(found(states), heads(states)) and not found.shares_output
    assert torch.equal(found.best(states, 5)[0], heads.best(states, 5)[0])


def test_a_layer_without_its_weight_is_named(target, tmp_path):
    LAYOUTS["blocks"](random_heads(*sizes(target)), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["blocks.1.layers.0.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="layer 0 of head 1"):
        MedusaHeads.from_pretrained(tmp_path, target)


def _without_head(tensors, pattern):
    return {name: item for name, item in tensors.items() if pattern not in name}


# By layout: what is changed, and what is said.
WRONG = {
    "no block": ("blocks", lambda found: _without_head(found, "blocks.1."), "weight of layer 0 of head 1"),
    "a layer of one head only": (
        "blocks",
        lambda found: found | {f"blocks.0.layers.1.{kind}": torch.zeros(32, 32) for kind in ("weight", "bias")},
        "lack the weight of layer 1 of head 1",
    ),
    "a bias of one head only": (
        "blocks",
        lambda found: _without_head(found, "blocks.2.layers.0.bias"),
        "lack the bias of layer 0 of head 2",
    ),
    "few outputs": ("blocks", lambda found: _without_head(found, "lm_heads.1."), r"outputs of \[0, 2\] only"),
    "no output": ("safetensors", lambda found: _without_head(found, "2.1."), r"outputs of \[0, 1\] only"),
    "an output elsewhere": (
        "safetensors",
        lambda found: _without_head(found, "1.1.weight") | {"1.2.weight": found["1.1.weight"]},
        "output of Medusa head 1 does not follow its 1 layers",
    ),
    "outputs of several sizes": (
        "blocks",
        lambda found: found | {"lm_heads.1.weight": found["lm_heads.1.weight"][:50]},
        r"3 output weights \[\(50, 32\), \(97, 32\)\]",
    ),
    "no map": (
        "blocks",
        lambda found: {name: item[:50] if "lm_heads" in name else item for name, item in found.items()},
        "outputs of 50 tokens lack a `token_map`, which names those of 97",
    ),
    "NaN": ("safetensors", lambda found: found | {"0.1.weight": torch.full((97, 32), torch.nan)}, "`0.1.weight` is"),
    "fp8": (
        "blocks",
        lambda found: found | {"blocks.0.layers.0.weight": torch.ones(32, 32).to(torch.float8_e4m3fn)},
        r"quantized \(`blocks.0.layers.0.weight`, float8_e4m3fn\)",
    ),
    "scale": (
        "safetensors",
        lambda found: found | {"0.0.linear.weight_scale": torch.ones(1)},
        "quantized .*weight_scale`",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_files_that_do_not_hold_all_of_it_are_refused(target, tmp_path, case):
    layout, change, said = WRONG[case]
    LAYOUTS[layout](random_heads(*sizes(target)), tmp_path)
    path = next(tmp_path.glob("*.safetensors"))
    changed = change(load_file(path))
    save_file({name: item.contiguous() for name, item in changed.items()}, path)
    with pytest.raises(ValueError, match=said) as error:
        MedusaHeads.from_pretrained(tmp_path, target)
    assert str(error.value).startswith(f"{tmp_path}: ")


@pytest.mark.parametrize(
    ("config", "is_right"),
    [
        ({"medusa_num_heads": NUM_HEADS + 1}, False),
        ({"model_type": "medusa", "num_heads": NUM_HEADS + 1}, False),
        ({"medusa_num_heads": NUM_HEADS - 1}, True),  # as published ones say
        ({"model_type": "t5", "num_heads": 16, "medusa_num_heads": NUM_HEADS}, True),
    ],
)
def test_configs_may_name_fewer_heads_but_not_more(target, tmp_path, config, is_right):
    LAYOUTS["blocks"](random_heads(*sizes(target)), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    if is_right:
        assert MedusaHeads.from_pretrained(tmp_path, target).num_heads == NUM_HEADS
    else:
        with pytest.raises(ValueError, match=f"holds {NUM_HEADS} Medusa heads, and `.*num_heads` is {NUM_HEADS + 1}"):
            MedusaHeads.from_pretrained(tmp_path, target)


def test_outputs_may_be_of_few_tokens(target, tmp_path):
    ids = torch.tensor([5, 80, 7, 2])
    published = [(layers, output[: len(ids)]) for layers, output in random_heads(*sizes(target))]
    LAYOUTS["blocks"](published, tmp_path)
    save_file(load_file(tmp_path / "model.safetensors") | {"token_map": ids}, tmp_path / "model.safetensors")
    states = torch.randn(3, target.config.hidden_size)
    tokens, _ = MedusaHeads.from_pretrained(tmp_path, target).best(states, 8)
    expected = ids[logits_of(published, states).argsort(dim=-1, descending=True)].transpose(0, 1)
    assert torch.equal(tokens, expected)


def test_dtype_is_the_targets(tmp_path):
    target = new_model("llama").bfloat16()
    LAYOUTS["pickled"](random_heads(*sizes(target)), tmp_path)
    heads = MedusaHeads.from_pretrained(tmp_path, target)
    assert heads.dtype == torch.bfloat16 and {item.dtype for item in heads.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("change", ["hidden", "vocab", "ids"])
def test_heads_of_other_targets_are_refused_with_both_shapes(target, tmp_path, change):
    hidden, vocab = sizes(target)
    LAYOUTS["blocks"](random_heads(hidden + 8 * (change == "hidden"), vocab + 5 * (change == "vocab")), tmp_path)
    if change == "ids":
        tensors = load_file(tmp_path / "model.safetensors")
        save_file(tensors | {"token_map": torch.arange(vocab) + 1}, tmp_path / "model.safetensors")
    wrong = {
        "hidden": rf"{hidden + 8}, {hidden + 8}.*hidden size {hidden}",
        "vocab": rf"{vocab + 5}, {hidden}.*{vocab} tokens",
        "ids": "token_map",
    }[change]
    with pytest.raises(ValueError, match=wrong):
        MedusaHeads.from_pretrained(tmp_path, target)


class Evil:
    def __reduce__(self):
        return print, ("this is run",)


def test_files_that_hold_something_else_are_refused(target, tmp_path, capsys):
    cases = {
        "empty": None,
        "damaged": b"no pickle",
        "code": pickle.dumps(Evil()),
        "no heads": {"a": torch.zeros(2)},
        "no tensors": {"0.0.linear.weight": 3},
    }
    for name, content in cases.items():
        folder = tmp_path / name
        folder.mkdir()
        if isinstance(content, bytes):
            (folder / "medusa_lm_head.pt").write_bytes(content)
        elif content is not None:
            torch.save(content, folder / "medusa_lm_head.pt")
        with pytest.raises(ValueError, match=str(folder)):
            MedusaHeads.from_pretrained(folder, target)
    assert "this is run" not in capsys.readouterr().out


def test_other_folders_say_nothing_of_medusa(tmp_path):
    assert not is_medusa_checkpoint(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    assert not is_medusa_checkpoint(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="no JSON object"):
        is_medusa_checkpoint(str(tmp_path))
