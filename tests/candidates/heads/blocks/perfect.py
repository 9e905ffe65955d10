"""
Block drafters that are right by design: their target goes round a cycle of tokens, and they copy the round before.

The target's hidden state is the embedding of its token (all layers add nothing), and its head maps that to the token's
successor. The drafter's one layer attends, by the turn of rotary embeddings alone, to the token exactly one distance
earlier. So whatever is off by one (positions, layouts of slots, tapped layers, what is committed) makes it wrong.
"""

import math
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from ....generate.helpers import tiny_llama
from .published import THETA, Published, z_lab

ROUND = 12  # tokens of the cycle
_HEAD = 32  # size of a head
_SHARP = 8.0  # what queries and keys are multiplied with
_SURE = 100.0  # what is known, among what is not
_FIRST = 3  # token of the cycle


def cyclic_target() -> LlamaForCausalLM:
    """Goes round the tokens 3, 4, ..., 14, and on with 3. Other tokens lead into the cycle."""
    model = tiny_llama(eos_token_id=None)
    model.generation_config.eos_token_id = None
    vocab, hidden = model.config.vocab_size, model.config.hidden_size
    generator = torch.Generator().manual_seed(0)
    tokens = torch.nn.functional.normalize(torch.randn(vocab, hidden - 1, generator=generator), dim=1)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(1.0)
        model.model.embed_tokens.weight.copy_(torch.cat([torch.ones(vocab, 1), tokens], dim=1))
        model.lm_head.weight.zero_()
        for token in range(_FIRST, _FIRST + ROUND):
            model.lm_head.weight[_FIRST + (token - _FIRST + 1) % ROUND, 1:] = tokens[token]
    return model


def cycle(length: int, start: int = 0) -> list[int]:
    return [_FIRST + (start + place) % ROUND for place in range(length)]


def perfect(target: LlamaForCausalLM, block_size: int, from_anchor: bool, kind: str = "dflash", **options) -> Published:
    """
    The head of the target shows the successor of what was copied: so the token before is copied, `ROUND` tokens before
    its own place. Heads of a kind know successors themselves; all but those that begin without a token copy nothing.
    """
    hidden, vocab = target.config.hidden_size, target.config.vocab_size
    distance = ROUND if from_anchor else ROUND + 1
    half = _HEAD // 2
    angles = -distance * THETA ** (-torch.arange(half) / half)
    first = torch.zeros(hidden)
    first[0] = 1.0  # every embedding has a 1 there
    query = torch.cat([angles.cos(), angles.sin()])  # turned back by the distance, it is the key
    key = torch.cat([torch.ones(half), torch.zeros(half)])
    identity = torch.eye(hidden)[1:]  # [hidden - 1, hidden]: the token's own part
    values = torch.cat([identity, torch.zeros(1, hidden)])
    copies = kind not in ("dflash2", "vanilla", "gated", "xpress")
    layer = {
        "input_layernorm": torch.ones(hidden),
        "post_attention_layernorm": torch.full((hidden,), _SURE if kind == "gemma" else 1.0),
        "self_attn.q_proj": query[:, None] * first,
        "self_attn.k_proj": key[:, None] * first,
        "self_attn.v_proj": values[:_HEAD],
        "self_attn.o_proj": torch.cat([torch.zeros(1, _HEAD), copies * _SURE * torch.eye(_HEAD)[: hidden - 1]]),
        "self_attn.q_norm": torch.full((_HEAD,), _SHARP),
        "self_attn.k_norm": torch.full((_HEAD,), _SHARP),
        "mlp.gate_proj": torch.zeros(4, hidden),
        "mlp.up_proj": torch.zeros(4, hidden),
        "mlp.down_proj": torch.zeros(hidden, 4),
    }
    tensors = {f"layers.0.{name}.weight": item for name, item in layer.items()}
    tensors |= {
        "fc.weight": torch.eye(hidden),
        "hidden_norm.weight": torch.ones(hidden),
        "norm.weight": torch.ones(hidden),
    }
    further, config = _of_kind(kind, target, block_size, from_anchor)
    settings = {"causal": (False,), "windows": (None,)} | options
    assert math.isqrt(hidden) < hidden == _HEAD
    slots = (-1,), block_size, vocab - 1
    own = {"from_anchor": from_anchor, "config": config}
    if kind == "own vocabulary":
        own["token_ids"] = ids = torch.tensor([1, *cycle(ROUND), 30])
        further["lm_head.weight"] = target.lm_head.weight[ids].detach()
    return Published(tensors | further, 1, 1, _HEAD, *slots, **own | settings)


def _of_kind(kind: str, target: LlamaForCausalLM, block_size: int, from_anchor: bool) -> tuple[dict, dict]:
    """Return the tensors and entries of the config that a kind adds."""
    hidden, vocab = target.config.hidden_size, target.config.vocab_size
    first, each = torch.eye(hidden)[:1], torch.arange(ROUND)
    before, after = torch.zeros(2, vocab, ROUND)  # which token of the cycle a token is, and whose successor
    before[cycle(ROUND), each], after[cycle(ROUND, 1), each] = 1.0, _SURE
    if kind == "jetspec":
        return {}, {"causal_head": True}
    if kind == "adapter":
        return {"hidden_dim_adapter.proj.weight": torch.eye(hidden)}, {}
    if kind == "gemma":
        norms = {f"layers.0.{side}_feedforward_layernorm.weight": torch.ones(hidden) for side in ("pre", "post")}
        rope = {"full_attention": {"rope_type": "default", "rope_theta": THETA}}
        own = {"global_head_dim": _HEAD, "num_global_key_value_heads": 1, "rope_parameters": rope}
        return norms | {"layers.0.layer_scalar": torch.ones(1)}, own
    if kind == "laguna":
        return {
            "layers.0.self_attn.g_proj.weight": torch.zeros(1, hidden),
            "aux_hidden_norms.0.weight": torch.ones(hidden),
        }, {}
    if kind == "dflash2":
        kernel = torch.zeros(2, 2, hidden)
        kernel[:, 0] = 1.0
        tensors = {f"layers.0.{part}_conv.base_kernel": kernel for part in ("attention", "mlp")}
        map_ = torch.zeros(2 * 2 * hidden // 8, hidden)
        tensors |= {f"layers.0.{part}_conv.kernel_projection.weight": map_ for part in ("attention", "mlp")}
        tensors |= {
            "candidate_selector.predecessor_codebook": before,
            "candidate_selector.successor_codebook": after,
            "candidate_selector.hidden_projection.weight": first.expand(ROUND, -1),
        }
        sizes = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": ROUND, "selector_top_k": vocab}
        return tensors, sizes
    if kind in ("vanilla", "gated", "rnn"):
        head = {"markov_w1.weight": before, "markov_w2.weight": after}
        if kind == "gated":
            head |= {
                "gate_proj.weight": torch.zeros(ROUND, hidden + ROUND),
                "gate_proj.bias": torch.full((ROUND,), 9.0),
            }
        if kind == "rnn":  # the token before the one before is in the state, and the successor's successor comes
            joint, bias = torch.zeros(3, ROUND, 2 * ROUND + hidden), torch.zeros(3, ROUND)
            bias[0] = -9.0  # nothing older stays in the state
            joint[1, :, ROUND : 2 * ROUND] = 9.0 * torch.eye(ROUND)
            joint[2, :, :ROUND] = 9.0 * torch.eye(ROUND).roll(1, 0)
            head |= {"joint_proj.weight": joint.flatten(0, 1), "joint_proj.bias": bias.flatten()}
        config = {"markov_rank": ROUND, "markov_head_type": kind}
        return {f"markov_head.{name}": item for name, item in head.items()}, config
    if kind == "domino":  # the state is the newest token's embedding, since nothing older stays in it
        size, table = hidden - 1, target.get_input_embeddings().weight[:, 1:]
        reads = [torch.zeros(size, hidden), -_SURE * first.expand(size, -1), torch.eye(hidden)[1:]]
        return {
            "prefix_gru.weight_ih_l0": torch.cat(reads),
            "prefix_gru.weight_hh_l0": torch.zeros(3 * size, size),
            "embed_proj.0.weight": torch.cat([torch.zeros(ROUND, hidden), 9.0 * table[cycle(ROUND)]], dim=1),
            "embed_proj.2.weight": after,
        }, {"projector_type": "domino", "shift_label": from_anchor}
    if kind == "xpress":  # pass by pass, one more slot is right
        zeros, eye = torch.zeros(ROUND, ROUND), torch.eye(ROUND)
        head = {"token_embed.weight": before, "in_proj.weight": torch.cat([zeros, zeros, eye], dim=1)}
        head |= {f"down_{part}.weight": torch.zeros(ROUND, hidden) for part in "hg"}
        head |= {f"mlp_{part}.weight": zeros for part in ("gate", "up", "down")}
        head |= {"mix_l": torch.zeros(ROUND, block_size, block_size), "readout.weight": after}
        config = {"xpress_rank": ROUND, "xpress_mlp_ratio": 1, "num_jacobi_passes": block_size}
        return {f"refiner_head.{name}": item for name, item in head.items()}, config
    return {}, {}


def written(target: LlamaForCausalLM, folder: Path, block_size: int = 6, from_anchor: bool = False, **options) -> str:
    """The folder of such a drafter."""
    z_lab(perfect(target, block_size, from_anchor, **options), target.config.vocab_size, folder)
    return str(folder)
