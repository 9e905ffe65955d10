"""Code of forwards: where it comes from, and the names that it mentions."""

import inspect
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn

# Packages whose forwards are known. What others do is not shown by a few tokens, nor by the names that they mention:
# they may clip values, or scale logits after some length.
_ORIGINS = ("transformers.", "torch.", __name__.partition(".")[0] + ".")

# Names in the forwards of known layers. A forward with other names may do things that a few tokens do not show: scale
# logits after some length, clip values, ...
_MENTIONS = frozenset(
    "_attn_implementation _bidirectional_window_overlay A_log act act_fn activation activation_fn "
    "ALL_ATTENTION_FUNCTIONS apply_mask_to_padding_states apply_rotary_pos_emb arange attention attention_dropout "
    "attentions attn_logit_softcapping BaseModelOutputWithPast bias block_sparse_moe block_type bool c_fc c_proj cache "
    "cache_position cat causal_conv1d_fn causal_conv1d_update chunk clamp_ clip_qkv config contiguous conv conv1d "
    "conv_kernel_size copy create_causal_mask create_recurrent_attention_mask create_sliding_window_causal_mask dense "
    "dense_4h_to_h dense_h_to_4h device dict do_layer_norm_before down_proj dropout dt_bias dtype DynamicCache "
    "eager_attention_forward emb_dropout embed_dropout embed_in embed_tokens embedding_dropout embedding_multiplier "
    "embedding_norm enumerate exp expand F fc1 fc2 feed_forward ffn_norm final_layer_norm final_layernorm float "
    "float32 functional gate_proj gate_up_proj get_conv_state get_interface get_recurrent_state get_seq_length getattr "
    "has_sliding_layers head_dim head_k_dim head_size head_v_dim hidden_states in_proj in_proj_a in_proj_b in_proj_qkv "
    "in_proj_z input_layernorm is_attention_layer is_recording_past is_sliding is_tracing isinstance jit k_layernorm "
    "k_norm k_proj key_dim key_layernorm last_hidden_state layer_idx layer_types layers linear_attn mean mlp "
    "MoeModelOutputWithPast ndim nn norm num_attention_heads num_heads num_hidden_layers num_key_value_groups "
    "num_key_value_heads o_proj operator_norm out_proj past_key_values pop pos_emb post_attention_dropout "
    "post_attention_layernorm post_feedforward_layernorm post_mlp_dropout post_mlp_layernorm post_self_attn_layernorm "
    "pre_feedforward_layernorm q_layernorm q_norm q_proj qk_layernorm qkv_proj query_key_value query_layernorm reshape "
    "resid_attn_dropout resid_dropout resid_mlp_dropout residual_dropout residual_multiplier rotary_emb rotary_ndims "
    "scaling self_attn self_attn_layer_norm set shape sigmoid silu size sliding_window softplus split squeeze tensor "
    "to torch torch_chunk_gated_delta_rule torch_recurrent_gated_delta_rule training transpose tuple type_as unsqueeze "
    "up_proj update update_conv_state update_recurrent_state use_bidirectional_attention use_parallel_residual "
    "use_qk_norm use_rope v_proj value_dim ValueError view w1 w2 w3 weight".split()
)
# Those of attention to latents.
_LATENT = frozenset(
    "apply_rotary_emb apply_rotary_pos_emb_interleave copy_ expand_kv kv_a_layernorm kv_a_proj_with_mqa kv_b_proj "
    "kv_lora_rank new_empty q_a_layernorm q_a_proj q_b_proj q_lora_rank qk_head_dim qk_nope_head_dim qk_rope_head_dim "
    "rope_interleave v_head_dim".split()
)
_IMAGES = frozenset("_deepstack_process clone len range".split())  # added to hidden states, in prompts with images only
# Those of state spaces.
_STATE_SPACE = frozenset(
    "chunk_size conv_dim D intermediate_size mamba2_chunk_scan mamba2_selective_state_update "
    "mamba2_split_conv1d_scan_combined n_groups ssm_state_size time_step_limit variance_epsilon".split()
)
# Further ones of single layers: of parts that plans leave out, such as attention to an encoder, or refuse.
_OWN_MENTIONS = {
    "AfmoeAttention": frozenset(["is_local_attention"]),
    "AfmoeDecoderLayer": frozenset(["pre_mlp_layernorm"]),
    "AfmoeModel": frozenset(["hidden_size", "mup_enabled"]),
    **dict.fromkeys(
        ["ApertusDecoderLayer", "Apertus1p5TextDecoderLayer"],
        frozenset(["attention_layernorm", "feedforward_layernorm"]),
    ),
    "BambaDecoderLayer": frozenset(["mamba", "pre_ff_layernorm"]),
    "BambaModel": frozenset(["layers_block_type"]),
    **dict.fromkeys(
        "BambaMixer GraniteMoeHybridMambaLayer Mamba2Mixer NemotronHMamba2Mixer".split(),
        _STATE_SPACE,
    ),
    "Cohere2MoeAttention": frozenset(["force_rope"]),
    "CwmModel": frozenset(["CwmModelOutputWithPast"]),
    "FlintAttention": frozenset(["sinks"]),
    **dict.fromkeys(
        ["Gemma4TextAttention", "Gemma4UnifiedTextAttention"],
        frozenset("is_kv_shared_layer layer_type store_full_length_kv v_norm".split()),
    ),
    "Gemma4UnifiedTextDecoderLayer": frozenset(["layer_scalar"]),
    "Gemma4UnifiedTextModel": frozenset(
        "_maybe_slice_kv_shared_inputs any first_kv_shared_layer_idx Gemma4UnifiedTextModelOutputWithPast get int "
        "is_flash_attention_requested items KVSharingDict slice unique_layer_types values".split()
    ),
    "Gemma4TextDecoderLayer": frozenset(
        "enable_moe_block experts hidden_size_per_layer_input layer_scalar per_layer_input_gate per_layer_projection "
        "post_feedforward_layernorm_1 post_feedforward_layernorm_2 post_per_layer_input_norm "
        "pre_feedforward_layernorm_2 router".split()
    ),
    "Gemma4TextModel": frozenset(
        "_maybe_slice_kv_shared_inputs all any embed_tokens_per_layer first_kv_shared_layer_idx "
        "Gemma4TextModelOutputWithPast get get_per_layer_inputs hidden_size hidden_size_per_layer_input int "
        "is_flash_attention_requested items KVSharingDict no_grad nonzero per_layer_input_scale "
        "per_layer_model_projection per_layer_model_projection_scale per_layer_projection_norm "
        "project_per_layer_inputs RuntimeError slice unique_layer_types values".split()
    ),
    **dict.fromkeys(
        "DeepseekV2Attention DeepseekV3Attention Glm4MoeLiteAttention MiniCPM3Attention YoutuAttention".split(),
        _LATENT,
    ),
    "MiniCPM3DecoderLayer": frozenset(["residual_scale"]),
    "GPT2Attention": frozenset(
        "_upcast_and_reordered_attn attn_dropout baddbmm c_attn cross_attention_cache empty EncoderDecoderCache get "
        "hasattr is_updated keys matmul maybe_autocast p q_attn reorder_and_upcast_attn RuntimeError "
        "self_attention_cache softmax split_size type values".split()
    ),
    "GPT2Block": frozenset("attn crossattention hasattr ln_1 ln_2 ln_cross_attn".split()),
    "GPT2Model": frozenset(
        "add_cross_attention BaseModelOutputWithPastAndCrossAttentions create_bidirectional_mask drop "
        "EncoderDecoderCache gradient_checkpointing h ln_f warn_if_padding_and_no_attention_mask wpe wte".split()
    ),
    "GptOssAttention": frozenset(["sinks"]),
    "GraniteMoeHybridDecoderLayer": frozenset(["has_experts", "mamba", "shared_mlp"]),
    **dict.fromkeys(("GraniteMoeHybridMLP", "GraniteMoeSharedMLP"), frozenset(["input_linear", "output_linear"])),
    "GraniteMoeHybridModel": frozenset(["layers_block_type"]),
    "GraniteMoeSharedDecoderLayer": frozenset(["shared_mlp"]),
    "Mamba2Block": frozenset(["mixer", "residual_in_fp32"]),
    "Mamba2Model": frozenset(
        "embeddings gradient_checkpointing Mamba2Output norm_f output_hidden_states return_dict use_cache".split()
    ),
    "NemotronHBlock": frozenset(["mixer"]),
    "NemotronHModel": frozenset("embeddings get norm_f".split()),
    "Lfm3Attention": frozenset(["g_proj"]),
    "Lfm3DecoderLayer": frozenset(["post_ffn_norm", "post_operator_norm"]),
    "Lfm3Model": frozenset(["get"]),
    "Ministral3Attention": frozenset(["get", "get_llama_4_attn_scale", "rope_parameters"]),
    "OPTDecoder": frozenset("cumsum embed_positions layerdrop long ones project_in project_out rand".split()),
    "OPTLearnedPositionalEmbedding": frozenset("cumsum forward long offset super".split()),
    "Qwen3NextGatedDeltaNet": frozenset(
        "fix_query_key_value_ordering in_proj_ba in_proj_qkvz num_k_heads num_v_heads".split()
    ),
    **dict.fromkeys("Qwen3OmniMoeThinkerTextModel Qwen3VLMoeTextModel Qwen3VLTextModel".split(), _IMAGES),
}

Kind = type[nn.Module]

# Functions that apply rotary embeddings: to heads as most do, to neighbours, to neighbours as complex numbers.
ROTATIONS = "apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave", "apply_rotary_emb"
QUERY_FACTORS = "get_llama_4_attn_scale"  # a function that returns factors of queries


def foreign_code(kinds: Iterable[Kind]) -> str | None:
    """
    Describe the first forward of these kinds, or function that it calls, that is not of a known package; None if there
    is none.
    """
    for kind in kinds:
        for name, function in _functions(kind).items():
            if not all(map(_is_known, _wrapped(function))):
                return f"{kind.__name__}.{name} is not transformers' own"
    return None


def unknown_mentions(kinds: Iterable[Kind]) -> str | None:
    """Describe the first of the kinds whose forward mentions unknown names; None if there is none."""
    for kind in kinds:
        further = mentions(kind) - _MENTIONS - _OWN_MENTIONS.get(kind.__name__, frozenset())
        if further:
            return f"{kind.__name__} mentions {sorted(further)}"
    return None


def mentions(kind: Kind) -> set[str]:
    """Return names in a kind's forward, and in those of its model's own functions that the forward calls."""
    functions = [function for function in _functions(kind).values() if not _is_general(function)]
    return {name for function in functions for name in _names(function)}


def rotation_function(kind: Kind, name: str = "apply_rotary_pos_emb") -> Any:
    """
    Return the function of this name by which attention modules of this kind apply rotary embeddings; None if their file
    has none.
    """
    return getattr(sys.modules[kind.__module__], name, None)


def _functions(kind: Any) -> dict[str, Any]:
    """Return a kind's forward, and the kind's own functions that it calls, by name."""
    found, names = {}, ["forward"]
    while names:
        name = names.pop()
        function = getattr(kind, name, None)
        function = function.fget if isinstance(function, property) else function
        if name == "forward" or (name not in found and isinstance(function, FunctionType)):
            found[name] = function
            if name == "forward" or not _is_general(function):
                names += _names(function) - found.keys()
    return found


def _is_general(function: Any) -> bool:
    """Return whether a function is that of all modules or models."""
    return _origin(inspect.unwrap(function)) in ("torch.nn.modules.module", "transformers.modeling_utils")


def _is_known(function: Any) -> bool:
    return (_origin(function) or "").startswith(_ORIGINS)


def _origin(function: Any) -> str | None:
    """Return the module in which a function was written, which its own attributes may hide."""
    return getattr(function, "__globals__", {}).get("__name__")


def _wrapped(function: Any) -> Iterator[Any]:
    """Yield a function and all those that it wraps."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _names(function: Any) -> set[str]:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return set() if code is None else set(_names_in(code))


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _names_in(part)
