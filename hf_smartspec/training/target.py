"""Parts of a target that drafters are trained with: sizes, first weights, hidden states, and probabilities to learn."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedModel

from ..target_model.compat import shared_value
from ..target_model.logits import LogitScaling

CALM = 0.3  # of the final norm's weights: logits that are too sure cost the first updates
NOISE = 0.05  # of random weights beside those that pass a hidden state on
_ROPE = ("default", "linear", "llama3", "yarn")  # types that drafters copy
MAPS = {name: f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
MAPS |= {name: f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")}
_NORMS = ("input_layernorm", "post_attention_layernorm")


def layer_config(target: PreTrainedModel, neurons: int | None, num_layers: int = 1) -> Any:
    """Return the config of a Llama's layers with the target's sizes; `neurons`: of the MLP, the target's by default."""
    config = target.config.get_text_config(decoder=True)
    heads = shared_value(config, "num_attention_heads") or 1
    rope = getattr(config, "rope_parameters", None)
    # Other types depend on the length of the text, or rotate only a part of each head, which a Llama does not.
    is_known = isinstance(rope, dict) and "rope_theta" in rope and rope.get("rope_type") in _ROPE
    turns_all = isinstance(rope, dict) and rope.get("partial_rotary_factor", 1.0) == 1.0
    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=neurons or shared_value(config, "intermediate_size") or 4 * config.hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=shared_value(config, "num_key_value_heads") or heads,
        head_dim=shared_value(config, "head_dim") or config.hidden_size // heads,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        max_position_embeddings=getattr(config, "max_position_embeddings", 2048),
        rope_parameters=rope if is_known and turns_all else None,
    )


def output_weight(target: PreTrainedModel) -> torch.Tensor:
    """
    Return the weight of the target's output layer, `[vocab_size, hidden_size]`.

    Raises:
        ValueError: if it is quantized.
    """
    output: Any = target.get_output_embeddings()
    if not output.weight.is_floating_point():
        raise ValueError("Drafters start from the target's output layer, which is quantized: train them before that.")
    weight: torch.Tensor = output.weight.detach()
    return weight


@torch.no_grad()
def layer_weights(target: PreTrainedModel, number: int) -> dict[str, torch.Tensor]:
    """
    Return the weights of a decoder layer by name (`q_proj`, ..., and the factors of its norms), float32; none unless it
    is a Llama's.
    """
    decoder: Any = target.get_decoder()
    layers: Any = getattr(decoder, "layers", ())
    layer: Any = layers[number] if -len(layers) <= number < len(layers) else nn.Module()
    weights = {name.removesuffix(".weight") for name, _ in layer.named_parameters() if name.endswith(".weight")}
    has_biases = any(name.endswith("norm.bias") for name, _ in layer.named_parameters())  # unlike RMS norms
    if weights != {*MAPS.values(), *_NORMS} or has_biases or not hasattr(decoder, "norm"):
        return {}
    found = {name: layer.get_submodule(path).weight for name, path in MAPS.items()}
    found |= {name: _factors(target, layer.get_submodule(name)) for name in _NORMS}
    return {name: item.detach().float().cpu() for name, item in found.items()}


@torch.no_grad()
def norm_weight(target: PreTrainedModel) -> torch.Tensor:
    """Return the factors of the target's final norm, float32 `[hidden_size]`."""
    decoder: Any = target.get_decoder()
    return _factors(target, decoder.norm).detach().float().cpu()


def _factors(target: PreTrainedModel, norm: nn.Module) -> torch.Tensor:
    size = target.config.get_text_config(decoder=True).hidden_size
    ones = torch.ones(1, size, dtype=target.dtype, device=target.device)  # some norms add 1 to their weights
    factors: torch.Tensor = norm(ones)[0]
    return factors


def check_layers(layers: Sequence[int], target: PreTrainedModel) -> None:
    """
    Raises:
        ValueError: if the last layer's output is among the hidden states: transformers returns it only after the final
            norm.
    """
    num = target.config.get_text_config(decoder=True).num_hidden_layers
    if not all(0 <= layer < num for layer in layers):
        raise ValueError(f"Drafters that read layers {tuple(layers)} of {num} cannot be trained.")


@torch.no_grad()
def target_states(
    target: PreTrainedModel, layers: Sequence[int], input_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Return the target's hidden states that drafters read, `[rows, length, layers * hidden]` float32, and its last ones,
    after the final norm, `[rows, length, hidden]`.
    """
    output = target.get_decoder()(input_ids=input_ids, output_hidden_states=True, use_cache=False)
    states = torch.cat([output.hidden_states[layer] for layer in layers], dim=-1)
    return states.float(), output.last_hidden_state


@torch.no_grad()
def target_probs(
    target: PreTrainedModel, ids: torch.Tensor | None, hidden: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    """
    Return the target's probabilities `[n, len(ids)]` among a drafter's tokens from last states `[n, hidden]`; all 0
    where the text's own next token, in `tokens` (`[n]`), is none of these: such places are not learnt.
    """
    output: Any = target.get_output_embeddings()
    scaling = LogitScaling.of(target)
    if ids is None:
        return scaling.apply(output(hidden)).float().softmax(dim=-1)
    if type(output) is nn.Linear:  # most of the cost of all tokens is saved
        logits = nn.functional.linear(hidden, output.weight[ids], None if output.bias is None else output.bias[ids])
    else:  # with adapters, for example
        logits = output(hidden).index_select(-1, ids)
    ordered = ids.sort().values  # `torch.isin` would wait for a GPU
    is_own = ordered[torch.searchsorted(ordered, tokens).clamp(max=len(ids) - 1)] == tokens
    return scaling.apply(logits).float().softmax(dim=-1) * is_own[:, None]
