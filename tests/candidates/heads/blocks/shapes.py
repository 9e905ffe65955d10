"""Names and shapes of block drafters' tensors, and the weights of the golden numbers."""

import math
from collections.abc import Mapping

import torch


def shapes(hidden: int, states: int, layers: int, heads: int, kv_heads: int, head_dim: int, inner: int) -> dict:
    """Shapes of all tensors of a backbone that reads `states` numbers of the target."""
    found: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, states), "hidden_norm.weight": (hidden,)}
    found["norm.weight"] = (hidden,)
    for layer in range(layers):
        own = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (heads * head_dim, hidden),
            "self_attn.k_proj": (kv_heads * head_dim, hidden),
            "self_attn.v_proj": (kv_heads * head_dim, hidden),
            "self_attn.o_proj": (hidden, heads * head_dim),
            "self_attn.q_norm": (head_dim,),
            "self_attn.k_norm": (head_dim,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        found |= {f"layers.{layer}.{name}.weight": shape for name, shape in own.items()}
    return found


def convolution_shapes(hidden: int, layers: int, size: int, group: int) -> dict:
    found: dict[str, tuple[int, ...]] = {}
    for layer in range(layers):
        for part in ("attention_conv", "mlp_conv"):
            found[f"layers.{layer}.{part}.base_kernel"] = (2, size, hidden)
            found[f"layers.{layer}.{part}.kernel_projection.weight"] = (2 * size * hidden // group, hidden)
    return found


def selector_shapes(vocab: int, hidden: int, rank: int) -> dict:
    books = {f"candidate_selector.{kind}_codebook": (vocab, rank) for kind in ("predecessor", "successor")}
    return books | {"candidate_selector.hidden_projection.weight": (rank, hidden)}


def markov_shapes(kind: str, vocab: int, own_vocab: int, hidden: int, rank: int) -> dict:
    found: dict[str, tuple[int, ...]] = {"markov_w1.weight": (vocab, rank), "markov_w2.weight": (own_vocab, rank)}
    if kind == "gated":
        found |= {"gate_proj.weight": (rank, hidden + rank), "gate_proj.bias": (rank,)}
    if kind == "rnn":
        found |= {"joint_proj.weight": (3 * rank, 2 * rank + hidden), "joint_proj.bias": (3 * rank,)}
    return {f"markov_head.{name}": shape for name, shape in found.items()}


def domino_shapes(vocab: int, hidden: int, inner: int, state: int) -> dict:
    found: dict[str, tuple[int, ...]] = {"prefix_gru.weight_ih_l0": (3 * state, hidden)}
    found |= {"prefix_gru.weight_hh_l0": (3 * state, state), "embed_proj.0.weight": (inner, hidden + state)}
    return found | {"embed_proj.2.weight": (vocab, inner)}


def xpress_shapes(vocab: int, own_vocab: int, hidden: int, rank: int, inner: int, block_size: int) -> dict:
    found: dict[str, tuple[int, ...]] = {"token_embed.weight": (vocab, rank), "in_proj.weight": (rank, 3 * rank)}
    found |= {"down_h.weight": (rank, hidden), "down_g.weight": (rank, hidden), "mix_l": (rank, block_size, block_size)}
    found |= {"mlp_gate.weight": (inner, rank), "mlp_up.weight": (inner, rank), "mlp_down.weight": (rank, inner)}
    return {f"refiner_head.{name}": shape for name, shape in found.items()} | {
        "refiner_head.readout.weight": (own_vocab, rank)
    }


def waves(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """The weights with which golden numbers were computed: a sine for each tensor, by its place among sorted names."""
    found = {}
    for place, name in enumerate(sorted(shapes)):
        count = torch.arange(math.prod(shapes[name]), dtype=torch.float64)
        wave = 0.5 * torch.sin(0.37 * count + 1.3 * place) + ("norm" in name)
        found[name] = wave.view(shapes[name]).float()
    return found
