"""Tiny targets whose files hold MTP layers behind their own, as published ones do."""

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from ...models import RECURRENT, VOCAB_SIZE, WINDOW

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
    "num_experts_per_tok": 2,
}
HYBRIDS = [name for name in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text") if name in RECURRENT]
_GROUPS = {"first_k_dense_replace": 1, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
TARGETS = {
    "deepseek_v3": ("DeepseekV3Config", _SIZES | _GROUPS | _LATENT),
    "glm4_moe": ("Glm4MoeConfig", _SIZES | _GROUPS | {"num_key_value_heads": 2, "head_dim": 16}),
    "mellum": (  # whose MTP layer looks through a window
        "MellumConfig",
        _SIZES
        | {"num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "sliding_window": WINDOW}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    **{  # with two layers, of which one keeps states, and an MTP layer of full attention
        name: (
            RECURRENT[name][0],
            RECURRENT[name][1]
            | {"layer_types": ["linear_attention", "full_attention", "full_attention"], "eos_token_id": None},
        )
        for name in HYBRIDS
    },
}
NUM_LAYERS = 2
_SHARED = (f".{NUM_LAYERS}.embed_tokens.weight", f".{NUM_LAYERS}.shared_head.head.weight")


def write_target(name: str, folder: Path, num_mtp_layers: int = 1, seed: int = 0) -> None:
    """A target of 2 layers, and so many MTP layers: decoder layers behind its own, with what MTP adds to them."""
    torch.manual_seed(seed)
    config_class, options = TARGETS[name]
    config = getattr(transformers, config_class)(**options | {"num_hidden_layers": NUM_LAYERS + num_mtp_layers})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    tensors, hidden = load_file(folder / "model.safetensors"), config.hidden_size
    for layer in range(NUM_LAYERS, NUM_LAYERS + num_mtp_layers):
        prefix = f"model.layers.{layer}."
        tensors[f"{prefix}eh_proj.weight"] = torch.randn(hidden, 2 * hidden) / hidden**0.5
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            tensors[f"{prefix}{norm}.weight"] = 1 + 0.3 * torch.randn(hidden)
        tensors[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    if name in ("mellum", *HYBRIDS):
        tensors = {_mellum_name(key): item for key, item in tensors.items() if not key.endswith(_SHARED)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    content = json.loads((folder / "config.json").read_text())
    content |= {"num_hidden_layers": NUM_LAYERS}
    content |= {} if name in HYBRIDS else {"num_nextn_predict_layers": num_mtp_layers}
    content |= {key: content[key][:NUM_LAYERS] for key in ("layer_types", "mlp_layer_types") if key in content}
    (folder / "config.json").write_text(json.dumps(content))


def _mellum_name(name: str) -> str:
    """As the files of Mellum and Qwen name the tensors of their only MTP layer."""
    own = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "shared_head.norm": "norm"}
    for part, other in own.items():
        name = name.replace(f"model.layers.{NUM_LAYERS}.{part}.", f"mtp.{other}.")
    return name.replace(f"model.layers.{NUM_LAYERS}.", "mtp.layers.0.")


def load_target(folder: Path, monkeypatch) -> PreTrainedModel:
    """The target, whose class knows at which number its MTP layers begin, as it does for published sizes only."""
    content = json.loads((folder / "config.json").read_text())
    model_class = getattr(transformers, content["architectures"][0])
    if content["model_type"] not in ("mellum", *HYBRIDS):
        monkeypatch.setattr(model_class, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.[2-9]\..*"])
    return model_class.from_pretrained(folder).eval()
