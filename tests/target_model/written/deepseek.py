"""Tiny models of DeepSeek's kinds: attention to latents, and routers that choose groups of experts first."""

import copy
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from ...models import DEVICE, VOCAB_SIZE

_OWN = {"vocab_size": VOCAB_SIZE, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_hidden_layers": 2}
_OWN |= {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "max_position_embeddings": 1024}
_HEADS = {"num_key_value_heads": 2, "head_dim": 16}
_LATENT = {"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 48}
_LATENT |= {"qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 24}
_EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1, "moe_intermediate_size": 32}
_EXPERTS |= {"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 1.5}
_EXPERTS |= {"first_k_dense_replace": 1}
CONFIGS = {
    "glm4_moe": ("Glm4MoeConfig", _OWN | _HEADS | _EXPERTS | {"use_qk_norm": True}),
    "dots1": ("Dots1Config", _OWN | _HEADS | _EXPERTS),
    "exaone_moe": ("ExaoneMoeConfig", _OWN | _HEADS | _EXPERTS),
    "solar_open": ("SolarOpenConfig", _OWN | _HEADS | _EXPERTS),
    "hy_v3": ("HYV3Config", _OWN | _HEADS | _EXPERTS | {"router_scaling_factor": 1.7}),
    "minimax_m2": ("MiniMaxM2Config", _OWN | _HEADS | {"num_local_experts": 8, "num_experts_per_tok": 3}),
    "deepseek_v3": ("DeepseekV3Config", _OWN | _LATENT | _EXPERTS),
    "deepseek_v2": ("DeepseekV2Config", _OWN | _LATENT | _EXPERTS | {"topk_method": "group_limited_greedy"}),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", _OWN | _LATENT | _EXPERTS),
    "youtu": ("YoutuConfig", _OWN | _LATENT),
    "minicpm3": ("MiniCPM3Config", _OWN | _LATENT),
}
# Attention that does more: it chooses keys, or scales queries by their positions.
OTHERS = {
    "deepseek_v32": ("DeepseekV32Config", _OWN | _LATENT | _EXPERTS | {"index_n_heads": 2, "index_head_dim": 32}),
    "mistral4": ("Mistral4Config", _OWN | _LATENT | _EXPERTS),
}
CONFIGS = {name: pair for name, pair in CONFIGS.items() if hasattr(transformers, pair[0])}
# Whether this release's caches hold latents, from which attention makes keys and values.
LATENT = hasattr(DeepseekV3Attention, "expand_kv")


def new_deepseek(name: str, dtype: torch.dtype = torch.float32, **changes) -> PreTrainedModel:
    """A model of its own, with biases of routers that count; these and routers are in float32, as files are loaded."""
    class_name, arguments = (CONFIGS | OTHERS)[name]
    config = getattr(transformers, class_name)(**copy.deepcopy(arguments) | changes)
    model = getattr(transformers, class_name.replace("Config", "ForCausalLM"))(config).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3, generator=generator)
    biases = biases_of(model)
    for owner in biases:
        owner.e_score_correction_bias.normal_(std=0.2, generator=generator)
    model = model.to(dtype).requires_grad_(False).to(DEVICE)
    if name != "minimax_m2":
        for module in model.modules():
            if hasattr(module, "top_k") and "weight" in module._parameters:
                module.float()
    for owner in biases:
        owner.e_score_correction_bias = owner.e_score_correction_bias.float()
    return model


def biases_of(model: PreTrainedModel) -> list[Any]:
    """Return the modules that have the biases of routers."""
    return [module for module in model.modules() if "e_score_correction_bias" in module._buffers]
