"""GGUF files: names, shapes, what is stored, and queries and keys in the order in which llama.cpp rotates them."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from benchmarks.decode.peers.files import converted, interleaved, write_gguf

gguf = pytest.importorskip("gguf")


def new_llama(intermediate_size=48, tied=True, **options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=40, intermediate_size=intermediate_size, tie_word_embeddings=tied, initializer_range=0.2,
            **sizes, **options,
        )
    ).eval()  # fmt: skip


def read(path):
    """The fields of a file, and its tensors in float32 with their types."""
    reader = gguf.GGUFReader(path)
    tensors = {
        item.name: (gguf.dequantize(item.data, item.tensor_type), item.tensor_type.name) for item in reader.tensors
    }
    return {name: field.contents() for name, field in reader.fields.items()}, tensors


@pytest.mark.parametrize(("kind", "error"), [("float32", 0), ("bfloat16", 2**-8), ("int8", 0.01), ("int4", 0.07)])
def test_a_file_holds_every_weight_once(tmp_path, kind, error):
    model = new_llama()
    write_gguf(model, tmp_path / "x.gguf", kind)
    _, tensors = read(tmp_path / "x.gguf")
    expected = dict(converted(model))
    assert set(tensors) == set(expected) and len(expected) == 2 + 2 * 9  # embeddings, the last norm, two layers
    for name, weight in expected.items():
        stored, found = tensors[name]
        kinds = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_1"}
        assert found == ("F32" if weight.ndim == 1 else kinds[kind])
        assert (torch.from_numpy(stored.copy()) - weight).abs().max() <= error * weight.abs().max()


def test_metadata_describes_the_model(tmp_path):
    write_gguf(new_llama(intermediate_size=64), tmp_path / "x.gguf", "float32")
    found, _ = read(tmp_path / "x.gguf")
    assert found["general.architecture"] == "llama" and found["llama.block_count"] == 2
    assert (found["llama.attention.head_count"], found["llama.attention.head_count_kv"]) == (4, 2)
    assert found["llama.feed_forward_length"] == 64 and found["llama.rope.dimension_count"] == 16
    assert found["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6)
    assert len(set(found["tokenizer.ggml.tokens"])) == 40 == found["llama.vocab_size"]


def test_an_output_layer_of_its_own_is_written(tmp_path):
    assert "output.weight" in dict(converted(new_llama(tied=False)))
    assert "output.weight" not in dict(converted(new_llama(tied=True)))


def test_added_neurons_change_nothing():
    """48 neurons are no whole number of blocks of 32."""
    model, weights = new_llama(intermediate_size=48), dict(converted(new_llama(intermediate_size=48)))
    gate, up, down = (weights[f"blk.0.ffn_{name}.weight"] for name in ("gate", "up", "down"))
    assert gate.shape == up.shape == (64, 64) and down.shape == (64, 64)
    states = torch.randn(5, 64)
    result = torch.nn.functional.silu(states @ gate.T) * (states @ up.T) @ down.T
    torch.testing.assert_close(result, model.model.layers[0].mlp(states))


def test_neighbours_rotated_on_interleaved_rows_score_as_halves_do():
    """llama.cpp's rotation, written out for its layout, gives transformers' attention scores."""
    model, num_tokens, head_dim = new_llama(), 7, 16
    layer, weights = model.model.layers[0].self_attn, dict(converted(model))
    states = torch.randn(1, num_tokens, 64)
    positions = torch.arange(num_tokens)[None]
    cos, sin = LlamaRotaryEmbedding(model.config)(states, positions)
    heads = [part(states).unflatten(-1, (-1, head_dim)).transpose(1, 2) for part in (layer.q_proj, layer.k_proj)]
    query, key = apply_rotary_pos_emb(*heads, cos, sin)
    expected = query @ key.repeat_interleave(2, 1).mT

    def rotated(name):
        pairs = (states[0] @ weights[f"blk.0.{name}.weight"].T).reshape(num_tokens, -1, head_dim // 2, 2)
        angles = positions[0][:, None] * 10000.0 ** (-torch.arange(head_dim // 2) / (head_dim // 2))
        turned = torch.view_as_complex(pairs) * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.view_as_real(turned).flatten(2).transpose(0, 1)  # (heads, tokens, head_dim)

    scores = rotated("attn_q") @ rotated("attn_k").repeat_interleave(2, 0).mT
    torch.testing.assert_close(scores, expected[0], rtol=1e-4, atol=1e-5)
    weight = torch.arange(8.0)[:, None].expand(8, 3)
    assert interleaved(weight, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_other_models_and_kinds_are_refused(tmp_path):
    with pytest.raises(ValueError, match="gpt2"):
        write_gguf(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=9)), tmp_path / "x", "float32")
    with pytest.raises(ValueError, match="without biases"):
        write_gguf(new_llama(attention_bias=True), tmp_path / "x", "float32")
    with pytest.raises(ValueError, match="`kind`"):
        write_gguf(new_llama(), tmp_path / "x", "float16")
