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


def perfect(target: LlamaForCausalLM, block_size: int, from_anchor: bool, **options) -> Published:
    """
    The head of the target shows the successor of what was copied: so the token before is copied, `ROUND` tokens before
    its own place.
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
    layer = {
        "input_layernorm": torch.ones(hidden),
        "post_attention_layernorm": torch.ones(hidden),
        "self_attn.q_proj": query[:, None] * first,
        "self_attn.k_proj": key[:, None] * first,
        "self_attn.v_proj": values[:_HEAD],
        "self_attn.o_proj": torch.cat([torch.zeros(1, _HEAD), 100.0 * torch.eye(_HEAD)[: hidden - 1]]),
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
    settings = {"causal": (False,), "windows": (None,)} | options
    assert math.isqrt(hidden) < hidden == _HEAD
    return Published(tensors, 1, 1, _HEAD, (-1,), block_size, vocab - 1, from_anchor=from_anchor, **settings)


def written(target: LlamaForCausalLM, folder: Path, block_size: int = 6, from_anchor: bool = False, **options) -> str:
    """The folder of such a drafter."""
    z_lab(perfect(target, block_size, from_anchor, **options), target.config.vocab_size, folder)
    return str(folder)
