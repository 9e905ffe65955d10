"""Decoders whose layers have inputs of their own, or attend to the keys and values of earlier ones (Gemma 4)."""

import numpy as np
import pytest
import torch
from transformers import Gemma4Config, Gemma4ForConditionalGeneration, Gemma4TextConfig

import hf_smartspec
from hf_smartspec.cpu.few_tokens import has_kernels
from hf_smartspec.drafts.tree import DraftTree
from hf_smartspec.target_model.forward.packed import PackedForward
from hf_smartspec.target_model.layout.rows import RowInput
from hf_smartspec.target_model.support.twin import small_config
from hf_smartspec.target_model.written import packed_forward, written_decoder
from hf_smartspec.target_model.written.decoder import WrittenDecoder
from hf_smartspec.target_model.written.plan import UnknownStructureError
from hf_smartspec.target_model.written.recognition import make_plan
from hf_smartspec.target_model.written.trial import check

from ...models import CONFIGS, GEMMA_4, new_model
from .test_compiled import by_layers, model_of, tried
from .test_written import TREE, are_near, is_written, logits_of

pytestmark = pytest.mark.skipif(not GEMMA_4, reason="this release's layers are not known")
compiled = pytest.mark.skipif(not has_kernels(torch.float32), reason="there is no compiled code for this CPU")
SHARED = "gemma4_text+shared"


def are_the_models_own(model) -> bool:
    return are_near(logits_of(packed_forward(model)), logits_of(PackedForward(model)))


@compiled
@pytest.mark.parametrize(("layers", "num_early"), [(set(), 2), ({2}, 2), ({3}, 3), ({4}, 4)])
def test_layers_without_keys_compute_no_more_than_is_asked_for(layers, num_early):
    """Leave out tokens whose logits nobody asks for, from the first layer on that stores nothing."""
    forward = tried(model_of(SHARED))
    row, run = forward.add(), RowInput(forward.add(), np.arange(3, 12), DraftTree.chain(np.arange(4, 7)))
    with forward.taps.taking(layers):
        forward.forward([RowInput(row, np.arange(2, 7)), run])
    programs = [item for (item,) in written_decoder(forward.model)._compiled._free.values()]
    (program,) = [item for item in programs if (item.written.layers, item.written.room) == (layers, 32)]
    counts = [program.token_counts[number] for number in program.written.multiplied]
    assert counts == [17] * 6 * num_early + [5] * (6 * (4 - num_early) + 1)


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompts_in_parts_none_of_whose_tokens_are_kept(dtype, programs):
    model = model_of(SHARED, dtype)
    tried(model)
    programs.clear()
    forward, text = packed_forward(model, prefill_chunk=16), np.arange(3, 63)
    logits, _ = forward.forward([RowInput(forward.add(), text)])
    assert len(programs) > 1
    other = by_layers(model)
    assert torch.equal(logits, other.forward([RowInput(other.add(), text)])[0])


@compiled
@pytest.mark.parametrize("is_in_place", [True, False])
@torch.no_grad()
def test_changes_of_factors_are_seen(is_in_place):
    model = model_of("gemma4_text")
    forward, layer = tried(model), model.model.layers[1]
    if is_in_place:
        layer.layer_scalar.fill_(0.5)
    else:
        layer.layer_scalar = torch.full((1,), 0.5)
    assert are_the_models_own(model) and is_written(model) and forward.model is model


@torch.no_grad()
def test_hooks_of_further_embeddings_are_called():
    model = new_model("gemma4_text")
    assert is_written(model)
    before = logits_of(packed_forward(model))
    model.model.embed_tokens_per_layer.register_forward_hook(lambda module, args, output: output * 2)
    assert is_written(model) and are_the_models_own(model)
    assert not torch.equal(before, logits_of(packed_forward(model)))


def test_tokens_that_attend_to_later_ones_are_left_to_the_models_own_forward():
    with pytest.raises(UnknownStructureError):
        make_plan(new_model("gemma4_text", use_bidirectional_attention="all"))


@torch.no_grad()
def test_models_that_see_read_padding_in_place_of_images():
    """Replace such tokens also where there is no image: a text may hold them, and a model may pick one."""
    text = Gemma4TextConfig(**CONFIGS["gemma4_text"][1])
    tokens = {"image_token_id": 5, "video_token_id": 24, "audio_token_id": 6}
    config = Gemma4Config(text_config=text, vision_config=None, audio_config=None, **tokens)
    torch.manual_seed(0)
    model = hf_smartspec.enable(Gemma4ForConditionalGeneration(config).eval())
    assert {5, 24, 6} <= {*range(3, 24 + 1), *TREE.tokens.tolist()}, "texts and drafts have them"
    assert is_written(model) and are_the_models_own(model)
    inputs = {"input_ids": torch.tensor([[3, 5, 7, 24, 6, 3, 5, 7]]), "max_new_tokens": 20, "do_sample": False}
    assert torch.equal(model.generate(**inputs, assistant="prompt_lookup"), model.generate(**inputs))
    before = logits_of(packed_forward(model))
    model.config.image_token_id = 9
    assert are_the_models_own(model) and not torch.equal(before, logits_of(packed_forward(model)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_towers_for_images_and_sounds_are_left_alone(dtype):
    text = Gemma4TextConfig(**CONFIGS[SHARED][1])
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = sizes | {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 32}
    audio = sizes | {"output_proj_dims": 32}
    config = Gemma4Config(text_config=text, vision_config=vision, audio_config=audio)
    assert is_written(Gemma4ForConditionalGeneration(config).to(dtype).eval())


def _without_factor(layer):
    layer.factor = None


def _without_projection(layer):
    layer.layer_input.norm = torch.zeros_like


def _with_keys_of_another(layer):
    layer.source = 0


def _with_values_as_they_are(layer):
    layer.value_norm = None


_TWO_SOURCES = {"layer_types": [f"{kind}_attention" for kind in "sliding sliding full sliding full".split()]}
WRONG = {
    "no factor": (1, _without_factor, "gemma4_text", {}),
    "no inputs": (1, _without_projection, "gemma4_text", {}),
    "keys of another layer": (3, _with_keys_of_another, SHARED, _TWO_SOURCES | {"num_hidden_layers": 5}),
    "values without norms": (1, _with_values_as_they_are, "gemma4_text+equal", {}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wrong", WRONG)
@torch.no_grad()
def test_wrong_arithmetic_is_found(wrong, dtype):
    layer, change, name, options = WRONG[wrong]
    model = new_model(name, dtype=dtype, **options)
    check(model, WrittenDecoder(make_plan(model)[0]))
    plan = make_plan(model)[0]
    change(plan.layers[layer])
    with pytest.raises(UnknownStructureError, match=f"layer {layer} differs"):
        check(model, WrittenDecoder(plan))


def test_twins_have_layers_that_share():
    """Keep a few layers of all types that store keys and values, and as many that attend to these."""
    types = (["sliding_attention"] * 4 + ["full_attention"]) * 7
    config = Gemma4TextConfig(num_hidden_layers=35, layer_types=types, num_kv_shared_layers=20)
    twin = small_config(config)
    assert (twin.num_hidden_layers, twin.num_kv_shared_layers) == (10, 5) and twin.layer_types == types[:10]
    config = Gemma4TextConfig(num_hidden_layers=35, layer_types=types, num_kv_shared_layers=2)
    assert (small_config(config).num_hidden_layers, small_config(config).num_kv_shared_layers) == (10, 2), "ends alike"


@pytest.mark.parametrize("name", GEMMA_4)
def test_texts_longer_than_windows_are_those_of_plain_decoding(name):
    model = new_model(name, **({} if name == "gemma4_text" else {"head_dim": 16}))
    tokens = torch.randint(3, 97, (3, 10), generator=torch.Generator().manual_seed(0)).repeat(1, 2)
    mask = (torch.arange(20) >= torch.tensor([[7], [0], [12]])).long()
    inputs = {"input_ids": tokens * mask, "attention_mask": mask, "max_new_tokens": 24, "do_sample": False}
    expected = model.generate(**inputs)
    with hf_smartspec.enabled(model):
        assert torch.equal(model.generate(**inputs, assistant="prompt_lookup"), expected)
    assert is_written(model)
