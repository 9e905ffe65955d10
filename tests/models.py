"""Tiny models with random weights, built from configurations: no download, a few milliseconds each."""

import copy
import os
from functools import cache

import torch
import transformers
from packaging.version import Version
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    GenerationConfig,
    PreTrainedModel,
)

from hf_smartspec.target_model.compat import drops_soft_caps
from hf_smartspec.target_model.private import TRANSFORMERS

DEVICE = torch.device(os.environ.get("HF_SMARTSPEC_DEVICE", "cpu"))  # of all models that tests build here
VOCAB_SIZE = 97
WINDOW = 5  # of sliding layers: shorter than nearly every text in the tests

_TOKENS = {"vocab_size": VOCAB_SIZE, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LLAMA = _TOKENS | {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
_GPT = _TOKENS | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 1024}
_BART = _TOKENS | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 1024}
_WINDOWED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_LAYER_INPUTS = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE}
_EQUAL_VALUES = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_BESIDE_MLP = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}

# Architectures that run packed: model type -> (configuration class, its arguments).
PACKED = {
    "llama": ("LlamaConfig", _LLAMA),
    "mistral": ("MistralConfig", _LLAMA | {"sliding_window": WINDOW, "head_dim": 16}),
    "qwen2": ("Qwen2Config", _LLAMA),
    "qwen3": ("Qwen3Config", _LLAMA | {"head_dim": 16}),
    "qwen3_moe": ("Qwen3MoeConfig", _LLAMA | _EXPERTS | {"moe_intermediate_size": 32, "head_dim": 16}),
    "gemma2": ("Gemma2Config", _LLAMA | {"head_dim": 8, "sliding_window": WINDOW}),
    "gemma3_text": ("Gemma3TextConfig", _LLAMA | _WINDOWED | {"head_dim": 16}),
    "gpt2": ("GPT2Config", _GPT),
    "opt": ("OPTConfig", _BART | {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "phi3": ("Phi3Config", _LLAMA),
    "gpt_neox": ("GPTNeoXConfig", _LLAMA),
    "olmo2": ("Olmo2Config", _LLAMA),
    "mixtral": ("MixtralConfig", _LLAMA | {"num_local_experts": 4}),
    "granite": ("GraniteConfig", _LLAMA),
    "cohere": ("CohereConfig", _LLAMA),
    "stablelm": ("StableLmConfig", _LLAMA),
    "smollm3": ("SmolLM3Config", _LLAMA | {"no_rope_layers": [1, 0]}),
    "phi": ("PhiConfig", _LLAMA),
    "starcoder2": ("Starcoder2Config", _LLAMA | {"sliding_window": WINDOW}),
    "cohere2": ("Cohere2Config", _LLAMA | _WINDOWED),
    "olmo": ("OlmoConfig", _LLAMA),
    "olmo3": ("Olmo3Config", _LLAMA | _WINDOWED),
    "glm": ("GlmConfig", _LLAMA | {"head_dim": 8}),
    "glm4": ("Glm4Config", _LLAMA | {"head_dim": 16}),
    "gpt_bigcode": ("GPTBigCodeConfig", _GPT),
    "helium": ("HeliumConfig", _LLAMA | {"head_dim": 8}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        _LLAMA | _EXPERTS | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    ),
    "olmoe": ("OlmoeConfig", _LLAMA | _EXPERTS),
    "granitemoe": ("GraniteMoeConfig", _LLAMA | {"num_local_experts": 4}),
    "nemotron": ("NemotronConfig", _LLAMA),
    "persimmon": ("PersimmonConfig", _LLAMA),
    "exaone4": ("Exaone4Config", _LLAMA | _WINDOWED),
    "ernie4_5": ("Ernie4_5Config", _LLAMA | {"head_dim": 16}),
    "seed_oss": ("SeedOssConfig", _LLAMA | {"head_dim": 8}),
    "biogpt": ("BioGptConfig", _BART | {"intermediate_size": 64}),
    # Windows that are off by default.
    "qwen2+window": ("Qwen2Config", _LLAMA | _WINDOWED | {"use_sliding_window": True}),
    "qwen3+window": ("Qwen3Config", _LLAMA | _WINDOWED | {"use_sliding_window": True, "head_dim": 8}),
    "qwen2_moe+window": (
        "Qwen2MoeConfig",
        _LLAMA
        | _EXPERTS
        | _WINDOWED
        | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "use_sliding_window": True},
    ),
    "qwen3_moe+window": (
        "Qwen3MoeConfig",
        _LLAMA
        | _EXPERTS
        | {"moe_intermediate_size": 32, "head_dim": 8, "use_sliding_window": True, "sliding_window": WINDOW},
    ),
    "phi3+window": ("Phi3Config", _LLAMA | {"sliding_window": WINDOW}),
    "mixtral+window": ("MixtralConfig", _LLAMA | {"num_local_experts": 4, "sliding_window": WINDOW}),
    "smollm3+window": ("SmolLM3Config", _LLAMA | _WINDOWED | {"no_rope_layers": [1, 0], "use_sliding_window": True}),
    "gpt_oss": (
        "GptOssConfig",
        _LLAMA
        | _WINDOWED
        | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    # Not in the library's list: these are probed on first use.
    "gemma": ("GemmaConfig", _LLAMA | {"head_dim": 8}),
    "gemma4_text": ("Gemma4TextConfig", _LLAMA | _WINDOWED | _LAYER_INPUTS | {"head_dim": 8, "global_head_dim": 8}),
    "gemma4_text+shared": (  # the last layers attend to keys and values of earlier ones
        "Gemma4TextConfig",
        _LLAMA
        | _LAYER_INPUTS
        | {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW, "num_hidden_layers": 4}
        | {"head_dim": 8, "global_head_dim": 16, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
        | {"final_logit_softcapping": 3.0},
    ),
    "gemma4_text+equal": (  # keys are values, too, in layers without a window
        "Gemma4TextConfig",
        _LLAMA | _WINDOWED | _EQUAL_VALUES | {"head_dim": 8, "global_head_dim": 16},
    ),
    "gemma4_text+experts": (
        "Gemma4TextConfig",
        _LLAMA | _WINDOWED | _LAYER_INPUTS | _BESIDE_MLP | {"head_dim": 8, "global_head_dim": 8},
    ),
    "phimoe": ("PhimoeConfig", _LLAMA | {"num_local_experts": 4}),
    "ministral": ("MinistralConfig", _LLAMA | _WINDOWED | {"head_dim": 8}),
    "apertus": ("ApertusConfig", _LLAMA),
    "hunyuan_v1_dense": ("HunYuanDenseV1Config", _LLAMA | {"head_dim": 8}),
    "modernbert-decoder": (
        "ModernBertDecoderConfig",
        _BART | {"intermediate_size": 64, "local_attention": 2 * WINDOW, "global_attn_every_n_layers": 2},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        _LLAMA
        | {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
        | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    ),
}

_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
_DELTA = _LINEAR | {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_SHARED_EXPERT = _EXPERTS | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
# In small chunks, transformers' sums of decays are small, and exact enough to be compared with.
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 8}

# Architectures with states in place of keys and values in some layers: these are packed, too.
_RECURRENT = {
    "qwen3_5_text": (  # with sizes that compiled code serves
        "Qwen3_5TextConfig",
        _LLAMA | _DELTA | {"head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    ),
    "qwen3_5_moe_text": ("Qwen3_5MoeTextConfig", _LLAMA | _DELTA | _SHARED_EXPERT | {"head_dim": 16}),
    "qwen3_next": ("Qwen3NextConfig", _LLAMA | _DELTA | _SHARED_EXPERT | {"head_dim": 8}),
    "qwen4_exp_text": (  # chooses 2 of its blocks of 2 keys; hashes the last 3 tokens
        "Qwen4ExpTextConfig",
        _LLAMA
        | _DELTA
        | _SHARED_EXPERT
        | {"head_dim": 8, "hc_count": 2, "hc_lowrank": 8, "ple_layer_ids": [1], "ple_embed_dim": 32}
        | {"ngram_size": 3, "heads_per_ngram": 2, "ngram_vocab_size_base": 50, "split_ngram_parts": 1}
        | {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 4}
        | {"indexer_compress_ratio": 2, "eos_token_id": 2},
    ),
    "olmo_hybrid": ("OlmoHybridConfig", _LLAMA | _DELTA),
    "kimi_linear": (
        "KimiLinearConfig",
        _LLAMA
        | _LINEAR
        | {"linear_num_heads": 4, "linear_head_dim": 8, "num_key_value_heads": 4, "kv_lora_rank": 16}
        | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "moe_intermediate_size": 32}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    ),
    "bailing_hybrid": (  # as Kimi Linear, with a bound on the decay
        "BailingHybridConfig",
        _LLAMA
        | _LINEAR
        | {"head_dim": 8, "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
        | {"v_head_dim": 8, "moe_intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_mtp_layers": 0},
    ),
    "bamba": (  # likewise
        "BambaConfig",
        _LLAMA | _MAMBA | {"hidden_size": 64, "attn_layer_indices": [1], "mamba_d_head": 16, "mamba_d_state": 16},
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        _LLAMA | _MAMBA | {"num_local_experts": 4, "layer_types": ["mamba", "attention"]},
    ),
    "falcon_h1": ("FalconH1Config", _LLAMA | _MAMBA | {"mamba_d_ssm": 64, "head_dim": 8}),
    "nemotron_h": (  # limits the time steps of prompts, by far more than usual here
        "NemotronHConfig",
        _LLAMA
        | {"layers_block_type": ["linear_attention", "full_attention", "mlp"], "time_step_min": 0.5, "head_dim": 8}
        | {"mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8, "chunk_size": 8},
    ),
    "zamba2": (
        "Zamba2Config",
        _LLAMA
        | {"layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1, "chunk_size": 8}
        | {"num_key_value_heads": 4, "mamba_d_state": 8, "mamba_headdim": 8, "n_mamba_heads": 8, "mamba_ngroups": 1},
    ),
    "lfm2": (  # with sizes that compiled code serves
        "Lfm2Config",
        _LLAMA | {"hidden_size": 64, "layer_types": ["conv", "full_attention"], "block_multiple_of": 32},
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        _LLAMA
        | _EXPERTS
        | {"layer_types": ["conv", "full_attention"], "moe_intermediate_size": 32, "num_dense_layers": 1},
    ),
    "lfm3": (  # windows, and windows of rotary embeddings of their own
        "Lfm3Config",
        _LLAMA
        | {"layer_types": ["conv", "sliding_attention", "full_attention"], "num_hidden_layers": 3}
        | {"sliding_window": WINDOW, "head_dim": 8},
    ),
    "mamba2": (
        "Mamba2Config",
        _TOKENS
        | {"hidden_size": 32, "num_heads": 8, "head_dim": 8, "state_size": 8, "num_hidden_layers": 2, "chunk_size": 8},
    ),
    "mamba": ("MambaConfig", _TOKENS | {"hidden_size": 32, "state_size": 8, "num_hidden_layers": 2}),
    "falcon_mamba": ("FalconMambaConfig", _TOKENS | {"hidden_size": 32, "state_size": 8, "num_hidden_layers": 2}),
    "jamba": (
        "JambaConfig",
        _LLAMA | _EXPERTS | {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4},
    ),
}

# The same, but in transformers padding changes their texts: batches are packed without it only.
_UNPADDED = {
    "minimax": (  # brings a cache of its own, whose masks forget padding
        "MiniMaxConfig",
        _LLAMA
        | {"head_dim": 8, "num_local_experts": 4, "block_size": 4}
        | {"layer_types": ["linear_attention", "full_attention"]},
    ),
    "recurrent_gemma": (
        "RecurrentGemmaConfig",
        _LLAMA | {"num_hidden_layers": 3, "lru_width": 32, "head_dim": 8, "attention_window_size": WINDOW},
    ),
}
RECURRENT = _RECURRENT if Version("5.24") <= TRANSFORMERS else {}  # earlier, layers do not call the known functions
UNPADDED = _UNPADDED if RECURRENT else {}
GEMMA_4 = [name for name in PACKED if name.startswith("gemma4")] if RECURRENT else []  # likewise

# Architectures that do not follow the attention interface, or not all of it: these run row by row.
ROWWISE = {
    "bloom": ("BloomConfig", _TOKENS | {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "falcon": ("FalconConfig", _TOKENS | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}),
    "mpt": ("MptConfig", _TOKENS | {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 1024}),
    "gptj": ("GPTJConfig", _GPT | {"rotary_dim": 4}),
    "codegen": ("CodeGenConfig", _GPT | {"rotary_dim": 4}),
    "gpt_neo": (
        "GPTNeoConfig",
        _TOKENS
        | {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 1024}
        | {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    ),
    "xglm": ("XGLMConfig", _TOKENS | {"d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4}),
    "llama4_text": (  # attends in chunks, which only the model's own masks know
        "Llama4TextConfig",
        _LLAMA | {"head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 64, "attention_chunk_size": WINDOW},
    ),
}

_T5 = (
    _TOKENS
    | {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
    | {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "decoder_start_token_id": 0}
)
_BEHIND_ENCODER = (
    _TOKENS
    | {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    | {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_start_token_id": 2}
    | {"forced_eos_token_id": None, "max_position_embeddings": 1024}
)

_GEMMA = _LLAMA | _WINDOWED | {"head_dim": 8}

# Decoders behind an encoder that reads tokens: these are packed.
ENCODER_DECODER = {
    "t5": ("T5Config", _T5),
    "t5_gated": ("T5Config", _T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mt5": ("MT5Config", _T5),
    "umt5": ("UMT5Config", _T5),
    "bart": ("BartConfig", _BEHIND_ENCODER),
    "mbart": ("MBartConfig", _BEHIND_ENCODER),
    "t5gemma": (
        "T5GemmaConfig",
        {"encoder": _GEMMA, "decoder": _GEMMA, "vocab_size": VOCAB_SIZE, "decoder_start_token_id": 1},
    ),
}

# Behind an encoder that hears: 20 frames of 8 mel bins.
SPEECH = {
    "whisper": (
        "WhisperConfig",
        _BEHIND_ENCODER
        | {"num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 96, "decoder_start_token_id": 3}
        | {"suppress_tokens": None, "begin_suppress_tokens": None},
    ),
}

# Decoders behind an encoder that cannot be packed.
ENCODER_DECODER_ROWWISE = {"m2m_100": ("M2M100Config", _BEHIND_ENCODER)}

# Models that cannot take tokens back, or run several at once: these are decoded plainly.
PLAIN = {
    "rwkv": ("RwkvConfig", _TOKENS | {"hidden_size": 32, "num_hidden_layers": 2}),
    "zamba": (  # several recurrences in a layer
        "ZambaConfig",
        _LLAMA
        | {"layers_block_type": ["mamba", "hybrid"] * 2, "num_hidden_layers": 4, "num_key_value_heads": 4}
        | {"mamba_d_state": 8, "mamba_dt_rank": 4},
    ),
    "openai-gpt": ("OpenAIGPTConfig", _GPT),  # has no cache
    "bert": ("BertConfig", _BART | {"intermediate_size": 64}),  # looks ahead unless it is told that it is a decoder
    "prophetnet": (  # feeds its cache one token at a time
        "ProphetNetConfig",
        _TOKENS
        | {"hidden_size": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_encoder_layers": 2}
        | {"num_decoder_layers": 2, "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4}
        | {"max_position_embeddings": 256, "is_encoder_decoder": False},
    ),
}

CONFIGS = PACKED | _RECURRENT | _UNPADDED | ROWWISE | ENCODER_DECODER | ENCODER_DECODER_ROWWISE | SPEECH | PLAIN


def new_model(
    architecture: str, seed: int = 0, dtype: torch.dtype = torch.float32, std: float = 0.3, **changes
) -> PreTrainedModel:
    """A model of its own, which the caller may change. Weights are N(0, std): large enough that texts vary."""
    class_name, arguments = CONFIGS[architecture]
    config = getattr(transformers, class_name)(**copy.deepcopy(arguments) | changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # decays of recurrent layers are drawn, too
        model = _auto_class(architecture).from_config(config).eval()
    if drops_soft_caps(model):
        model.set_attn_implementation("eager")
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=std, generator=generator)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.uniform_(0.7, 1.3, generator=generator)
    model.generation_config = GenerationConfig(
        pad_token_id=0, bos_token_id=1, decoder_start_token_id=arguments.get("decoder_start_token_id")
    )
    return (in_float64(model) if dtype == torch.float64 else model.to(dtype)).requires_grad_(False).to(DEVICE)


def _auto_class(architecture: str) -> type:
    if architecture in SPEECH:
        return AutoModelForSpeechSeq2Seq
    behind_encoder = architecture in ENCODER_DECODER | ENCODER_DECODER_ROWWISE
    return AutoModelForSeq2SeqLM if behind_encoder else AutoModelForCausalLM


def in_float64(model: PreTrainedModel) -> PreTrainedModel:
    """The model in float64, for which the default, grouped matrix products of experts are not implemented."""
    if getattr(model.config, "_experts_implementation", None) is not None:
        model.set_experts_implementation("eager")
    return model.double()


@cache
def shared_model(architecture: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """One model for the whole session; tests must leave it as it is."""
    return new_model(architecture, seed, dtype)


@cache
def noisy_model(
    architecture: str, noise: float = 0.02, seed: int = 0, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """A draft that mostly agrees with `shared_model`: its weights plus noise of the given share of their spread."""
    return with_noise(new_model(architecture, seed, dtype), noise, seed)


def with_noise(model: PreTrainedModel, noise: float = 0.02, seed: int = 0) -> PreTrainedModel:
    """This model, with noise of the given share of its weights' spread on them."""
    generator = torch.Generator().manual_seed(seed + 1)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            change = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.add_(change * parameter.std() * noise)
    return model
