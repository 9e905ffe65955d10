"""Names by which parts of models are recognised."""

# Names of layers' norms: before attention, after it, before the MLP, after it. The first row that fits counts.
NORMS = (
    ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),  # GLM 4
    ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),  # Gemma
    ("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"),  # AFMoE
    (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),  # OLMo 2
    ("input_layernorm", None, "post_attention_layernorm", None),  # Llama
    ("input_layernorm", None, "pre_feedforward_layernorm", None),  # VaultGemma
    ("input_layernorm", None, "pre_ff_layernorm", None),  # Bamba
    ("attention_layernorm", None, "feedforward_layernorm", None),  # Apertus
    ("input_layernorm", None, None, None),  # Cohere, Phi: attention and MLP side by side
    ("ln_1", None, "ln_2", None),  # GPT-2
    ("self_attn_layer_norm", None, "final_layer_norm", None),  # OPT
    ("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm"),  # LFM3
    ("operator_norm", None, "ffn_norm", None),  # LFM2
    ("norm", None, None, None),  # Nemotron-H, Mamba-2: layers of one part
)
NORMED_EMBEDDINGS = ("NanoChatModel",)  # decoders that normalize embeddings as what comes after layers
# Norms of an MLP beside experts, but for the first: after the MLP, before experts, after them.
MIXED_NORMS = ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")
LAYERS, EMBEDDING = ("layers", "h"), ("embed_tokens", "embed_in", "wte", "embeddings")
POSITIONS, ROTARY = ("wpe", "embed_positions"), ("rotary_emb", "pos_emb")
ATTENTION = "self_attn", "attention", "attn"
ALONE = ("mixer",)  # the one part of a layer, of any kind
STATE_SPACE = "A_log", "D", "dt_bias"  # parameters of Mamba-2
RECURRENT = "linear_attn", "conv", "mamba"
BY_HEAD = ("query_key_value",)  # each head's query, key and value lie together
EQUAL_VALUES, QUERY_ONLY = ("q_proj", "k_proj"), ("q_proj",)  # keys are values, too; those of an earlier layer
QUERY_KEY_VALUE = (
    ("q_proj", "k_proj", "v_proj"),
    ("qkv_proj",),
    ("c_attn",),
    BY_HEAD,
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    ("in_proj_qkvz", "in_proj_ba"),
    ("in_proj",),
    EQUAL_VALUES,
    QUERY_ONLY,
)
COMPRESS = ("kv_a_proj_with_mqa",)  # a latent, of which keys and values are made, and a rotated key
LATENT = frozenset(  # modules of attention to latents
    "kv_a_proj_with_mqa kv_a_layernorm kv_b_proj q_proj q_a_proj q_a_layernorm q_b_proj o_proj".split()
)
ATTENTION_OUTPUT = ("o_proj", "dense", "out_proj", "c_proj")
QUERY_NORM = "q_norm", "q_layernorm", "query_layernorm"
KEY_NORM, VALUE_NORM = ("k_norm", "k_layernorm", "key_layernorm"), ("v_norm",)
# Maps of attention's input to gates of its outputs, by kinds of attention. Others use gates in other ways.
OUTPUT_GATES = {"Lfm3Attention": "g_proj", "AfmoeAttention": "gate_proj"}
MLP_MAPS = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("gate_up_proj",), "down_proj"),
    (("up_proj",), "down_proj"),
    (("c_fc",), "c_proj"),
    (("fc1",), "fc2"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("w1", "w3"), "w2"),
    (("input_linear",), "output_linear"),
)
SHARED = ("shared_expert", "shared_experts", "shared_mlp")  # MLPs of all tokens beside experts
MULTIPLIER = ("residual_multiplier", "residual_scale")  # of the outputs of attention and MLP
MLPS = ("mlp", "block_sparse_moe", "feed_forward", "shared_mlp", "mixer")
BESIDE_EXPERTS = "shared_mlp"  # an MLP of all tokens, in layers that may have experts, too
ACTIVATION = ("act_fn", "activation_fn", "act", "activation")
IMAGE_NEWLINE = "image_newline"  # a parameter that stands between the lines of an image
FINAL_NORM = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "embedding_norm", "norm_f")

# Attributes of modules and configs that recognition reads, beside those that forwards mention.
READ = frozenset(
    "_experts_implementation alpha attn_logit_softcapping audio_token_id clip_qkv do_layer_norm_before "
    "embedding_multiplier eps final_logit_softcapping head_dim head_size image_token_id layer_idx "
    "layer_types layerdrop limit logit_scale logits_scaling max_norm num_attention_heads num_hidden_layers "
    "num_key_value_groups num_key_value_heads offset residual_multiplier scaling sliding_window "
    "use_bidirectional_attention use_parallel_residual variance_epsilon video_token_id".split()
)
STORED = frozenset(["pad_token_id"])  # likewise, where configs store them: the property of some (Idefics 3) warns
