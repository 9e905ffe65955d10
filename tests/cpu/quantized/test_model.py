"""Quantized models: changed in place, decoded with the same tokens by every source, clear about what they refuse."""

import copy
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import hf_smartspec
from hf_smartspec import Engine, Int4Linear, Int8Linear, SmartSpecConfig, quantize
from hf_smartspec.cpu.quantized import KINDS, QuantizedLinear, is_quantized
from hf_smartspec.cpu.quantized.product import plain_quantized_linear, quantized_linear, unrounded_tokens
from hf_smartspec.target_model.cost.profiling import mode_of, profile_path
from hf_smartspec.target_model.forward.packed import PackedForward
from hf_smartspec.target_model.written import packed_forward, written_decoder, written_decoders

from ...covering import IS_EXHAUSTIVE, exhaustive
from ...models import new_model, noisy_model
from ...target_model.written.test_written import logits_of

ARGUMENTS = {"max_new_tokens": 24, "do_sample": False}


def new_quantized(name: str = "llama", dtype=torch.float32, kind: str = "int8", **changes):
    return quantize(new_model(name, dtype=dtype, **changes), kind)


def ragged(num_rows: int) -> dict[str, torch.Tensor]:
    """Rows of different lengths, padded on the left, with a phrase that comes back."""
    ids = torch.arange(3, 15).remainder(5).add(4).repeat(num_rows, 1) + torch.arange(num_rows)[:, None]
    mask = torch.ones_like(ids)
    for row in range(num_rows):
        mask[row, : 2 * row] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def linears(model) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, (nn.Linear, QuantizedLinear))]


def test_all_linear_maps_are_replaced_in_place():
    model = new_model("qwen2", tie_word_embeddings=False)
    plain = copy.deepcopy(model)
    assert quantize(model, "int8") is model and is_quantized(model) and not is_quantized(plain)
    assert {type(module) for module in linears(model)} == {Int8Linear}
    assert len(linears(model)) == len(linears(plain)) == 15
    assert type(model.get_output_embeddings()) is Int8Linear
    assert model.dtype == torch.float32 and model.device.type == "cpu"
    assert not any(parameter.requires_grad for parameter in model.parameters())
    ids = torch.arange(3, 40)[None]
    expected, actual = plain(ids).logits, model(ids).logits
    assert 0 < (actual - expected).norm() < 0.1 * expected.norm()


@torch.no_grad()
def test_in_int4_all_but_the_output_layer_have_four_bits():
    model = new_model("qwen2", tie_word_embeddings=False)
    plain, ids = copy.deepcopy(model), torch.arange(3, 40)[None]
    quantize(model, "int4")
    head = model.get_output_embeddings()
    assert {type(module) for module in linears(model)} == {Int4Linear, Int8Linear} and is_quantized(model)
    assert [module for module in linears(model) if type(module) is Int8Linear] == [head]
    for own, linear in zip(linears(model), linears(plain)):
        linear.weight.copy_(own.dequantized())
    expected = plain(ids).logits
    with unrounded_tokens():
        assert torch.allclose(model(ids).logits, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert 0 < (model(ids).logits - expected).norm() < 0.1 * expected.norm()


def test_layers_with_few_outputs_are_in_int8():
    model = new_model("qwen2_moe")
    quantize(model, "int4")
    gates = [module for name, module in model.named_modules() if name.endswith("shared_expert_gate")]
    assert {type(module) for module in gates} == {Int8Linear}
    assert type(model.model.layers[0].self_attn.k_proj) is Int4Linear


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_cast_and_buffers_are_not(kind):
    """Angles of rotary embeddings stay in float32, as when a model is loaded in that dtype."""
    model = new_model("llama", head_dim=16)
    frequencies = model.model.rotary_emb.inv_freq.clone()
    quantize(model, kind, torch.bfloat16)
    layer = model.model.layers[0].mlp.up_proj
    assert model.dtype == model.model.norm.weight.dtype == torch.bfloat16
    assert torch.equal(model.model.rotary_emb.inv_freq, frequencies) and frequencies.dtype == torch.float32
    assert layer.scale.dtype == (torch.float32 if kind == "int8" else torch.float16)
    with hf_smartspec.enabled(model):
        plain = model.generate(**ragged(2), **ARGUMENTS, assistant="none")
        assert torch.equal(model.generate(**ragged(2), **ARGUMENTS, assistant="prompt_lookup"), plain)


def test_original_weights_are_freed_one_by_one(monkeypatch):
    model = new_model("llama")
    alive, most = [weakref.ref(linear) for linear in linears(model)], []
    make = Int8Linear.__init__

    def noted(self, *args):
        most.append(sum(item() is not None for item in alive))
        make(self, *args)

    monkeypatch.setattr(Int8Linear, "__init__", noted)
    quantize(model)
    assert most == list(range(len(alive), 0, -1))


def test_a_weight_that_int4_does_not_hold_leaves_the_model_as_it_is():
    model = new_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = 1e6
    with pytest.raises(ValueError, match="at most, got 1e"):
        quantize(model, "int4")
    assert {type(module) for module in linears(model)} == {nn.Linear}
    model = new_model("llama", tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = 1e6
    quantize(model, "int4")  # the output layer is in int8


def test_memory_is_given_back():
    model = new_model("llama", dtype=torch.bfloat16, tie_word_embeddings=False)
    shapes = [module.weight.shape for module in linears(model)]
    kept = sum(parameter.nbytes for parameter in model.parameters()) - 2 * sum(map(np.prod, shapes))
    quantize(model)
    padded = [(-(-rows // 16) * 16, -(-columns // 64)) for rows, columns in shapes]
    expected = kept + sum(rows * groups * (64 + 4) for rows, groups in padded)
    assert sum(parameter.nbytes for parameter in model.parameters()) == expected
    written_decoder(model)  # which lays weights side by side
    storages = {parameter.untyped_storage().data_ptr(): parameter.untyped_storage() for parameter in model.parameters()}
    assert sum(storage.nbytes() for storage in storages.values()) == expected


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_tied_output_layer_gets_a_weight_of_its_own(name):
    model = new_model(name, tie_word_embeddings=True)
    embeddings = model.get_input_embeddings().weight
    quantize(model)
    assert model.get_input_embeddings().weight is embeddings and embeddings.dtype == torch.float32
    expected = model(torch.tensor([[5, 6]])).logits
    model.tie_weights()
    assert model.get_output_embeddings().weight.dtype == torch.int8
    assert torch.equal(model(torch.tensor([[5, 6]])).logits, expected)


@pytest.mark.parametrize("num_rows", [1, 4])
@pytest.mark.parametrize("is_written", [True, False])
@pytest.mark.parametrize("source", ["none", "auto", "prompt_lookup", "draft", "trees"])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_plain_decoding(source, is_written, num_rows, kind):
    model, inputs = new_quantized(kind=kind), ragged(num_rows)
    draft = noisy_model("llama")
    sources = {"draft": SmartSpecConfig(draft, num_nodes=4), "trees": SmartSpecConfig(draft, num_nodes=8, width=3)}
    plain = model.generate(**inputs, **ARGUMENTS)
    with hf_smartspec.enabled(model), written_decoders(is_written):
        assert (written_decoder(model) is not None) == is_written
        actual = model.generate(**inputs, **ARGUMENTS, assistant=sources.get(source, source))
        statistics = model.smartspec_statistics.last
    assert torch.equal(actual, plain)
    if source in sources:
        assert statistics.drafted_tokens > 0 and statistics.accepted_tokens > 0


@pytest.mark.parametrize("name", ["gpt2", "bloom", "t5", "mixtral"])
@pytest.mark.parametrize("kind", KINDS)
def test_models_that_run_otherwise(name, kind):
    model, inputs = new_quantized(name, kind=kind), ragged(1)
    plain = model.generate(**inputs, **ARGUMENTS)
    with hf_smartspec.enabled(model):
        config = SmartSpecConfig("prompt_lookup", num_nodes=4)
        assert torch.equal(model.generate(**inputs, **ARGUMENTS, assistant=config), plain)


def test_a_quantized_draft_drafts():
    model, draft = new_model("llama"), quantize(copy.deepcopy(noisy_model("llama")))
    plain = model.generate(**ragged(4), **ARGUMENTS)
    with hf_smartspec.enabled(model):
        config = SmartSpecConfig(draft, num_nodes=4)
        assert torch.equal(model.generate(**ragged(4), **ARGUMENTS, assistant=config), plain)
        assert model.smartspec_statistics.last.accepted_tokens > 0


def test_sampled_tokens_are_those_of_the_seed():
    model, arguments = new_quantized(), {"do_sample": True, "seed": 5, "max_new_tokens": 16}
    with hf_smartspec.enabled(model):
        plain = model.generate(**ragged(4), **arguments, assistant="none")
        config = SmartSpecConfig(noisy_model("llama"), num_nodes=4)
        assert torch.equal(model.generate(**ragged(4), **arguments, assistant=config), plain)


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_serves_quantized_models(kind):
    model, prompts = new_quantized(kind=kind), [np.arange(3, 3 + length) for length in (9, 4, 14)]
    expected = [model.generate(torch.tensor(prompt)[None], **ARGUMENTS)[0, len(prompt) :] for prompt in prompts]
    with Engine(model, assistant="prompt_lookup", max_batch_size=2) as engine:
        names = [engine.add_request(prompt.tolist(), max_new_tokens=24) for prompt in prompts]
        outputs = [engine.get_result(name) for name in names]
    assert [output.generated_tokens for output in outputs] == [tokens.tolist() for tokens in expected]


@pytest.mark.parametrize("name", ["llama", "qwen2", "phi3", "gemma2", "olmo2", "starcoder2", "mixtral"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_written_out_decoders_compute_the_same(name, kind):
    """Nearly always to the last bits: these may move a number by one level, of which 127 make its token's largest."""
    model = new_quantized(name, kind=kind)
    assert written_decoder(model) is not None
    expected, actual = logits_of(PackedForward(model)), logits_of(packed_forward(model))
    differences = (actual - expected).abs().amax(-1)
    assert differences.median() <= 1e-5 * expected.abs().max()
    assert differences.max() <= 0.05 * expected.std()


def test_written_out_decoders_follow_quantization_and_weights():
    model = new_model("llama")
    before = written_decoder(model)
    quantize(model)
    after = written_decoder(model)
    assert before is not None and after is not None and after is not before
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.scale.mul_(2)
        assert torch.allclose(logits_of(packed_forward(model)), logits_of(PackedForward(model)), atol=1e-2)


def test_half_precision():
    model = new_quantized(dtype=torch.bfloat16)
    assert written_decoder(model) is not None and model(torch.tensor([[5, 6]])).logits.dtype == torch.bfloat16
    with hf_smartspec.enabled(model):
        assert model.generate(**ragged(4), **ARGUMENTS, assistant="auto").shape[0] == 4


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_casts_decode_alike(kind):
    model = new_quantized(kind=kind)
    plain = model.generate(**ragged(1), **ARGUMENTS)
    duplicate = copy.deepcopy(model)
    assert is_quantized(duplicate) and torch.equal(duplicate.generate(**ragged(1), **ARGUMENTS), plain)
    duplicate.to(torch.bfloat16)
    assert duplicate.dtype == torch.bfloat16 and duplicate.lm_head.scale.dtype == torch.float32
    duplicate.generate(**ragged(1), **ARGUMENTS)


@pytest.mark.parametrize("kind", KINDS)
def test_state_dicts_of_both_kinds_are_loaded(kind):
    plain, model, other = new_model("llama"), new_quantized(kind=kind), new_quantized(kind=kind, seed=1)
    ids = torch.arange(3, 20)[None]
    assert not torch.equal(other(ids).logits, model(ids).logits)
    for state in (model.state_dict(), plain.state_dict()):
        other.load_state_dict(new_quantized(kind=kind, seed=1).state_dict())
        other.load_state_dict(state)
        assert torch.equal(other(ids).logits, model(ids).logits)


def test_saving_is_refused(tmp_path, caplog):
    with pytest.raises(ValueError, match="quantized with int8 and is not serializable"):
        new_quantized().save_pretrained(tmp_path)
    assert "before `quantize`" in caplog.text
    assert not list(tmp_path.iterdir())


def test_profiles_tell_kinds_from_one_another():
    model = new_model("llama")
    modes, paths = [mode_of(model)], {profile_path(model)}
    for kind in KINDS:
        quantized = new_quantized(kind=kind)
        modes.append(mode_of(quantized))
        paths.add(profile_path(quantized))
    assert ["quantized" in mode for mode in modes] == [False, True, True] and len(paths) == 3


def test_unknown_kinds_and_models_are_refused():
    with pytest.raises(ValueError, match="`kind` must be 'int8' or 'int4', got 'int2'"):
        quantize(new_model("llama"), "int2")
    with pytest.raises(ValueError, match=r"`dtype` must be torch\.float32, .*, got torch\.int8"):
        quantize(new_model("llama"), "int8", torch.int8)
    with pytest.raises(TypeError, match="got Linear"):
        quantize(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"no `nn\.Linear`"):
        quantize(quantize_nothing_left())


def quantize_nothing_left():
    model = new_model("llama")
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, nn.Identity())
    return model


def test_models_that_cannot_be_quantized_are_left_as_they_are():
    model = new_quantized()
    with pytest.raises(ValueError, match="quantized already"):
        quantize(model)
    with pytest.raises(ValueError, match="on the CPU, got parameters on meta"):
        quantize(new_model("llama").to("meta"))
    with pytest.raises(ValueError, match="float32, bfloat16 or float16"):
        quantize(new_model("llama", dtype=torch.float64))
    hooked = new_model("llama")
    hooked.model.layers[1].mlp.up_proj.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="`up_proj` has hooks"):
        quantize(hooked)
    assert {type(module) for module in linears(hooked)} == {nn.Linear}


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT asks for it
def test_adapters_are_refused():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    wrapped = peft.get_peft_model(
        new_model("llama"), peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"])
    )
    with pytest.raises(TypeError, match="merge_and_unload"):
        quantize(wrapped)
    with pytest.raises(ValueError, match="has adapters"):
        quantize(wrapped.base_model.model)
    quantize(wrapped.merge_and_unload())


@pytest.mark.parametrize("dtype", [torch.bfloat16, *exhaustive([torch.float32])])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_products_of_real_activations_do_not_depend_on_what_is_beside_them(dtype, kind, real_folder, real_tokenizer):
    model = quantize(AutoModelForCausalLM.from_pretrained(real_folder, dtype=dtype), kind)
    num_seen = 0

    def compare(module, args, output):
        nonlocal num_seen
        num_seen += 1
        x, parameters = args[0][0], (module.weight, module.scale, module.bias, module.out_features)
        assert torch.equal(output[0], plain_quantized_linear(x, *parameters))
        for tokens in (slice(0, 1), slice(3, 5), slice(2, 14)):
            assert torch.equal(quantized_linear(x[tokens], *parameters), output[0, tokens])

    for module in linears(model):
        module.register_forward_hook(compare)
    model(**real_tokenizer("The capital of France is Paris, and that of Italy is Rome, as", return_tensors="pt"))
    assert num_seen == 7 * 30 + 1


@torch.no_grad()
def test_tokens_need_not_be_rounded():
    linear = nn.Linear(8, 3)
    x, quantized = torch.randn(5, 8), Int8Linear(linear.weight, linear.bias)
    with unrounded_tokens():
        actual = quantized(x)
    expected = x @ quantized.dequantized().T + linear.bias
    assert torch.allclose(actual, expected, atol=1e-6)
    assert not torch.equal(quantized(x), actual)


@pytest.mark.parametrize("dtype", [torch.float32, *exhaustive([torch.bfloat16])])
@pytest.mark.parametrize("kind", KINDS)
def test_a_real_models_tokens_depend_neither_on_drafts_nor_on_the_batch(dtype, kind, real_folder, real_tokenizer):
    model = quantize(AutoModelForCausalLM.from_pretrained(real_folder, dtype=dtype), kind)
    texts = ["The capital of France is", "def add(a, b):\n    return", "1, 2, 3, 1, 2, 3, 1, 2"]
    num_tokens = 24 if IS_EXHAUSTIVE else 10
    arguments = {"max_new_tokens": num_tokens, "do_sample": False, "eos_token_id": None}
    with hf_smartspec.enabled(model):
        alone = []
        for text in texts:
            inputs = real_tokenizer(text, return_tensors="pt")
            found = [
                model.generate(**inputs, **arguments, assistant=source)[0, -num_tokens:]
                for source in ("none", SmartSpecConfig("prompt_lookup", num_nodes=4))
            ]
            assert torch.equal(*found)
            alone.append(found[0])
        together = model.generate(
            **real_tokenizer(texts, return_tensors="pt", padding=True), **arguments, assistant="none"
        )
    assert torch.equal(together[:, -num_tokens:], torch.stack(alone))
    assert written_decoder(model) is not None, "though one number at its next level is what all later tokens see"
