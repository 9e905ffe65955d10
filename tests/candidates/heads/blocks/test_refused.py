"""Files of block drafters that are refused before any work, by what is wrong with them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_smartspec.candidates.heads.blocks.drafter import BlockDrafter

from ....models import shared_model
from .published import random_drafter, z_lab


@pytest.fixture(scope="module")
def target():
    return shared_model("llama")


def _without(name):
    return lambda tensors, config: tensors.pop(name)


def _with(name, item):
    return lambda tensors, config: tensors.update({name: item})


def _entry(**entries):
    return lambda tensors, config: config.update(entries)


def _own(**entries):
    return lambda tensors, config: config["dflash_config"].update(entries)


REFUSED = {
    "unknown tensor": (_with("layers.0.self_attn.sinks", torch.ones(4)), r"does not have: layers.0.self_attn.sinks"),
    "missing tensor": (_without("layers.1.mlp.up_proj.weight"), r"missing: layers.1.mlp.up_proj.weight"),
    "further layer": (_entry(num_hidden_layers=1), r"does not have: layers.1.input_layernorm.weight"),
    "wrong shape": (_with("norm.weight", torch.ones(31)), r"`norm.weight` \(31,\) in place of \(32,\)"),
    "quantized": (_with("fc.weight_scale", torch.ones(1)), r"quantized \(`fc.weight_scale`"),
    "damaged": (_with("norm.weight", torch.full((32,), torch.nan)), r"`norm.weight` is damaged"),
    "no d2t": (_entry(draft_vocab_size=60), r"60 of 97 tokens needs `d2t`"),
    "t2d": (_with("t2d", torch.ones(97, dtype=torch.bool)), r"`t2d` marks 97 tokens"),
    "mask": (_own(mask_token_id=None), r"`mask_token_id` must be a token, and is None"),
    "mask beyond": (_own(mask_token_id=97), r"`mask_token_id` 97 is none of the 97 embeddings"),
    "block": (_entry(block_size=None), r"`block_size` must be a positive integer, and is None"),
    "types": (_entry(layer_types=["linear_attention"] * 2), r"`layer_types` is .*linear_attention"),
    "window": (_entry(layer_types=["sliding_attention"] * 2), r"`sliding_window` must be a positive integer"),
    "vocabulary": (_entry(vocab_size=98), r"98 tokens does not fit one of 97"),
    "activation": (_entry(hidden_act="none"), r"`hidden_act` is 'none'"),
    "sinks": (_entry(attention_sink_bias=True), r"missing: layers.0.self_attn.attention_sink_bias"),
    "flag": (_entry(is_causal="false"), r"`is_causal` must be true or false, and is 'false'"),
    "nested flag": (_own(sample_from_anchor=1), r"`sample_from_anchor` must be true or false, and is 1"),
    "no slot": (_entry(block_size=1), r"`block_size` must be at least 2, and is 1: no slot predicts"),
    "confidence": (
        lambda tensors, config: (
            tensors.update({"confidence_head.proj.weight": torch.ones(1, 32)}),
            config.update(architectures=["DFlash2DraftModel"]),
        ),
        r"does not have: confidence_head.proj.weight",
    ),
    "layers": (
        lambda tensors, config: (config.update(num_target_layers=36), config["dflash_config"].pop("target_layer_ids")),
        r"reads layers \[2, 34\], of a target of 36, does not fit one of 2",
    ),
    "partial rotation": (_entry(partial_rotary_factor=1.5), r"`partial_rotary_factor` must lie in .*, and is 1.5"),
    "halves of pairs": (
        _entry(rope_scaling={"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.4}),
        r"do not turn pairs of the 8 numbers",
    ),
    "gate": (_with("layers.0.self_attn.g_proj.weight", torch.ones(5, 32)), r"has 5 rows"),
    "sizes": (_entry(intermediate_size=None), r"`intermediate_size` must be a positive integer"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(target, tmp_path, case):
    change, message = REFUSED[case]
    published = random_drafter(32, 97, own_vocab=60 if case == "t2d" else None)
    z_lab(published, 97, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message) as error:
        BlockDrafter.from_pretrained(tmp_path, target)
    assert str(tmp_path) in str(error.value)


def test_files_of_the_mask_tokens_embedding(target, tmp_path):
    z_lab(random_drafter(32, 97), 97, tmp_path)
    path = tmp_path / "mask_embedding.pt"
    torch.save({"embedding": torch.ones(1, 32), "mask_token_id": torch.tensor(7)}, path)
    drafter = BlockDrafter.from_pretrained(tmp_path, target)
    assert drafter.spec.mask_token == 7 and torch.equal(drafter.embed(torch.tensor([3]), 2)[0, 1], torch.ones(32))
    torch.save(torch.full((32,), torch.nan), path)
    with pytest.raises(ValueError, match="`mask_embedding` is damaged"):
        BlockDrafter.from_pretrained(tmp_path, target)
    path.write_bytes(b"no tensors")
    with pytest.raises(ValueError, match=r"`mask_embedding.pt` cannot be read"):
        BlockDrafter.from_pretrained(tmp_path, target)
