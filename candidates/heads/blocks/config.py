"""Configs of block drafters: kind, sizes, tapped layers of the target, layout of the slots, masks."""

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import AutoTokenizer, LlamaConfig, PreTrainedModel

from ..eagle.config import flag_of, flat_config
from .scores import GATED, RNN, VANILLA
from .sizes import FULL, MUSE, SLIDING, gemma_entries, positive, rope_of_types, rotary_share, sizes_of

DFLASH, DFLASH2, DSPARK, JETSPEC = "dflash", "dflash2", "dspark", "jetspec"
DOMINO, XPRESS = "domino", "xpress"
_SPECULATORS = (DFLASH, DFLASH2, DSPARK, XPRESS)
# Tensors that tell a kind, whatever the config says.
_SIGNS = {"candidate_selector.": DFLASH2, "markov_head.": DSPARK, "prefix_gru.": DOMINO, "refiner_head.": XPRESS}
_DFLASH2 = ("DFlash2DraftModel", "DFlash2BeamDraftModel", "MiniMaxDFlash2DraftModel")
_DSPARK = ("DSparkModel", "DSparkDraftModel")  # ends of names
# Where writers put what is not of the layers' sizes.
_NESTED = ("dflash_config", "dspark_config")
# Names of the lists of tapped layers: by the layer whose output is meant, and by the layer whose input is.
OUTPUTS, INPUTS = "target_layer_ids", ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")
_ADAPTER = "hidden_dim_adapter.proj.weight"  # of JetSpec
# Tensors of the layers of Gemma 4 and Laguna.
_GEMMA = "layers.0.pre_feedforward_layernorm.weight"
_GATE, _STATE_NORM = "layers.0.self_attn.g_proj.weight", "aux_hidden_norms.0.weight"
SINK = "attention_sink_bias"  # of a layer; also an entry
_SINKS = (SINK, "add_swa_attention_sink_bias")  # MiMo's
_NEOX = ("is_neox_style", "rope_is_neox_style")
_CAUSAL = ("is_causal", "causal", "causal_head", "use_swa", "sliding_window_non_causal")
# Entries that are true or false.
_FLAGS = (
    "sample_from_anchor", "shift_label", "attention_bias", "attention_k_eq_v", "enable_confidence_head",
    "confidence_head_with_markov", *_NEOX, *_CAUSAL, *_SINKS,
)  # fmt: skip


@dataclass(frozen=True)
class BlockConfig:
    """
    What the files of a block drafter say of it.

    Args:
        kind (`str`): "dflash", "dflash2", "dspark", "jetspec", "domino" or "xpress".
        sizes (`LlamaConfig`): Sizes of its own layers, and their rotary embeddings.
        target_hidden (`int`): Hidden size of the target.
        hidden_layers (tuple of `int`): See `TreeCandidateGenerator.hidden_layers`.
        block_size (`int`): Slots of a block, the anchor's included.
        first_slot (`int`): The first slot that predicts: 1 where slots predict their own position (fill-in), 0 where
            they predict the position after it (from the anchor).
        num_depths (`int`): Number of slots that predict.
        causal (tuple of `bool`): Of each layer, whether a slot sees only the slots up to itself.
        windows (tuple of `int`, *optional*): Of each layer, the last positions that a query sees, its own included.
        mask_token (`int`): Token of all slots after the first.
        draft_vocab (`int`): Number of tokens that the drafter's output has.
        has_bias (`bool`): Whether the maps of attention have one.
        has_embedding, has_head, has_mask_embedding, has_adapter (`bool`): Whether it has an embedding and a head of its
            own, an embedding of the mask token that is no line of these, and a map of each tapped state.
        embedding_scale, logits_scale (`float`), softcap (`float`, *optional*): Factors of the slots' embeddings and
            of the logits, and the limit of these.
        partial_rotary_factor (`float`): Share of a head's numbers, the first ones, that rotary embeddings turn (MiMo).
        has_sinks (tuple of `bool`): Of each layer, whether its softmax has a learned logit per head in its denominator
            (MiMo).
        is_interleaved (`bool`): Whether rotary embeddings turn neighbouring numbers rather than halves of a head.
        is_gemma (`bool`): Whether layers are those of Gemma 4: norms after attention and after the MLP, normed values,
            attention without a scale, and a factor of each layer.
        has_values (`bool`): Whether values have a map of their own; else, keys are values, too (Gemma 4).
        gate_size (`int`): Rows of a map whose softplus is multiplied with the output of attention (Laguna): one for
            each head, or for each number; 0: there is none.
        value_scale (`float`): Factor of values (MiMo).
        norms_states, norms_context (`bool`): Whether each tapped state is normed, and whether context goes through a
            layer's first norm (Laguna).
        options (mapping): Entries of the kind, under their names in files.
    """

    kind: str
    sizes: Any  # LlamaConfig, whose sizes are all filled in
    target_hidden: int
    hidden_layers: tuple[int, ...]
    block_size: int
    first_slot: int
    num_depths: int
    causal: tuple[bool, ...]
    windows: tuple[int | None, ...]
    mask_token: int
    draft_vocab: int
    has_bias: bool = False
    has_embedding: bool = False
    has_head: bool = False
    has_mask_embedding: bool = False
    has_adapter: bool = False
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    softcap: float | None = None
    partial_rotary_factor: float = 1.0
    has_sinks: tuple[bool, ...] = ()
    is_interleaved: bool = False
    is_gemma: bool = False
    has_values: bool = True
    gate_size: int = 0
    value_scale: float = 1.0
    norms_states: bool = False
    norms_context: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rotary(self) -> LlamaConfig:
        """The config of rotary embeddings, for which a head has only the numbers that they turn."""
        config: LlamaConfig = copy.deepcopy(self.sizes)
        config.head_dim = int(self.sizes.head_dim * self.partial_rotary_factor)
        return config


def entries_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return all entries of a `config.json`, where those of `dflash_config` or `dspark_config` come first."""
    flat = flat_config(config)
    return flat | {name: value for name, value in _own(flat).items() if value is not None}


def _own(config: Mapping[str, Any]) -> dict[str, Any]:
    return next((item for key in _NESTED if isinstance(item := config.get(key), dict) and item), {})


def read_config(
    config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], mask_token: int | None, target: PreTrainedModel
) -> BlockConfig:
    """
    Args:
        config (mapping): The file.
        shapes (mapping of `str` to sequence of `int`): Shapes of all tensors, under the names of `BlockDrafter`.
        mask_token (`int`, *optional*): The mask token, where another file has it.

    Raises:
        ValueError: naming an entry that is missing, or whose value is not known.
    """
    entries, own = entries_of(config), _own(flat_config(config))
    for name in _FLAGS:
        flag_of(entries, name)
    kind = _kind(entries, shapes)
    is_gemma = _GEMMA in shapes
    if is_gemma:
        entries = gemma_entries(entries)
    types, windows = _windows(entries, positive(entries, "num_hidden_layers"))
    entries |= rope_of_types(entries, {FULL} if is_gemma else set(types))
    sizes = sizes_of(entries, target)
    block_size, gate = positive(entries, "block_size"), shapes.get(_GATE, (0,))[0]
    if gate not in (0, heads := sizes.num_attention_heads, heads * (sizes.head_dim or 0)):
        raise ValueError(f"`{_GATE}` has {gate} rows, and must have one for each of {heads} heads, or of their numbers")
    first_slot = 0 if _is_from_anchor(entries, kind) else 1
    num_depths = block_size - (1 if kind == DOMINO else first_slot)
    if not num_depths:
        raise ValueError(f"`block_size` must be at least 2, and is {block_size}: no slot predicts a token")
    draft_vocab = int(entries.get("draft_vocab_size") or shapes.get("d2t", (sizes.vocab_size,))[0])
    if kind == DFLASH2 and draft_vocab != sizes.vocab_size:
        raise ValueError(f"DFlash2 drafts all {sizes.vocab_size} tokens, and `draft_vocab_size` is {draft_vocab}")
    target_hidden = int(entries.get("target_hidden_size") or sizes.hidden_size)
    return BlockConfig(
        kind=kind,
        sizes=sizes,
        target_hidden=target_hidden,
        hidden_layers=_hidden_layers(entries, shapes, target_hidden, target),
        block_size=block_size,
        first_slot=first_slot,
        num_depths=num_depths,
        causal=_causal(entries, types),
        windows=windows,
        mask_token=_mask_token(entries, target) if mask_token is None else mask_token,
        draft_vocab=draft_vocab,
        has_embedding="embed_tokens.weight" in shapes,
        has_head="lm_head.weight" in shapes or draft_vocab != sizes.vocab_size,
        has_mask_embedding="mask_embedding" in shapes,
        has_adapter=_ADAPTER in shapes,
        has_bias=bool(entries.get("attention_bias")) or "layers.0.self_attn.q_proj.bias" in shapes,
        embedding_scale=float(own.get("input_embedding_scale") or 1.0),
        logits_scale=_logits_scale(entries, own),
        softcap=own.get("final_logit_softcapping"),  # at the top, it may be the target's
        is_interleaved=entries.get(_NEOX[0], entries.get(_NEOX[1])) is False,
        partial_rotary_factor=rotary_share(entries),
        has_sinks=_have_sinks(entries, shapes, windows),
        is_gemma=is_gemma,
        has_values=not (is_gemma and entries.get("attention_k_eq_v")),
        gate_size=gate,
        value_scale=float(entries.get("attention_value_scale") or 1.0),
        norms_states=_STATE_NORM in shapes,
        norms_context=_STATE_NORM in shapes or _GATE in shapes,
        options=_options(entries, kind, shapes, sizes.hidden_size),
    )


def _kind(entries: Mapping[str, Any], names: Collection[str]) -> str:
    """Return the kind, by tensors before names, since servers have run DSpark's files as DFlash."""
    for prefix, kind in _SIGNS.items():
        if any(name.startswith(prefix) for name in names):
            return kind
    said, architecture = entries.get("speculators_model_type"), _architecture(entries)
    if said == DFLASH2 or architecture in _DFLASH2:
        return DFLASH2
    rank = entries.get("markov_rank")
    if rank or (said == DSPARK and rank is None):
        return DSPARK
    if said == XPRESS or entries.get("projector_type") == DOMINO:
        return XPRESS if said == XPRESS else DOMINO
    return JETSPEC if entries.get("causal_head") else DFLASH


def _architecture(entries: Mapping[str, Any]) -> str:
    return str((entries.get("architectures") or [""])[0])


def _is_from_anchor(entries: Mapping[str, Any], kind: str) -> bool:
    """Return whether slot j predicts the position after its own: DSpark's layout, and that of DeepSpec's DFlash."""
    value = entries.get("shift_label" if kind == DOMINO else "sample_from_anchor")
    is_default = kind == DSPARK or _architecture(entries).endswith(_DSPARK)
    return is_default if value is None else bool(value)


def _options(entries: Mapping[str, Any], kind: str, shapes: Mapping[str, Sequence[int]], hidden: int) -> dict[str, Any]:
    """Return the entries of a kind, where tensors tell what a config leaves open."""
    options: dict[str, Any] = {"causal_head": True} if kind == JETSPEC else {}
    if kind == DFLASH2:
        defaults = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
        options = _integers(entries, defaults)
        if hidden % options["conv_group_size"]:
            raise ValueError(f"`conv_group_size` {options['conv_group_size']} does not divide {hidden} channels")
    if kind == DOMINO:
        if entries.get("pure_draft_prefix_len", 1) != 1:
            raise ValueError(f"`pure_draft_prefix_len` is {entries['pure_draft_prefix_len']!r}, and known is 1")
        inner, state = (shapes.get(name, (1,)) for name in ("embed_proj.0.weight", "prefix_gru.weight_hh_l0"))
        options = _integers(entries, {"emb_dim": inner[0], "gru_hidden_dim": state[-1]})
        options |= {"projector_type": DOMINO, "shift_label": bool(entries.get("shift_label"))}
    if kind == XPRESS:
        defaults = {"xpress_rank": 256, "xpress_mlp_ratio": 2, "num_jacobi_passes": 6}
        options = _integers(entries, defaults)
    if kind == DSPARK:
        # Without an entry, by the tensors; without these, which are then missing, as speculators does.
        rank = entries.get("markov_rank") or shapes.get("markov_head.markov_w1.weight", (0, 256))[-1]
        parts = {"gate_proj": GATED, "joint_proj": RNN}
        by_tensors = [item for part, item in parts.items() if f"markov_head.{part}.weight" in shapes]
        types = by_tensors or [entries.get("markov_head_type") or VANILLA]
        if types[0] not in (VANILLA, GATED, RNN):
            raise ValueError(f"`markov_head_type` is {types[0]!r}, and known are {VANILLA!r}, {GATED!r} and {RNN!r}")
        options = {"markov_rank": rank, "markov_head_type": types[0]}
    confidence = shapes.get("confidence_head.proj.weight")
    if kind in (DFLASH2, DOMINO):
        return options  # their lattices read no confidence
    if confidence is not None or (kind == DSPARK and entries.get("enable_confidence_head")):
        reads = entries.get("confidence_head_with_markov", True) if confidence is None else confidence[-1] != hidden
        options |= {"enable_confidence_head": True, "confidence_head_with_markov": kind == DSPARK and bool(reads)}
        options["confidence_bias"] = confidence is None or "confidence_head.proj.bias" in shapes
    elif kind == DSPARK:
        options["enable_confidence_head"] = False
    return options


def _integers(entries: Mapping[str, Any], defaults: Mapping[str, int]) -> dict[str, Any]:
    """Return positive integers of the entries, by these names, or their defaults."""
    given = {name: entries[name] for name in defaults if entries.get(name) is not None}
    return {name: positive({**defaults, **given}, name) for name in defaults}


def _logits_scale(entries: Mapping[str, Any], own: Mapping[str, Any]) -> float:
    """Return the product of DFlash2's factor and of those for targets with muP."""
    scale = float(own.get("output_multiplier") or 1.0) * float(own.get("logit_scale") or 1.0)
    return scale / float(entries.get("logits_mup_width_multiplier") or 1.0)


def _windows(entries: Mapping[str, Any], num: int) -> tuple[list[str], tuple[int | None, ...]]:
    """Return the types of the layers, and how many positions up to its own a query of each sees; None for all."""
    window = entries.get("sliding_window")
    types = entries.get("layer_types") or [SLIDING if entries.get("model_type") == MUSE else FULL] * num
    if entries.get("use_swa"):
        types, window = [SLIDING] * num, entries.get("swa_window_size")
    if not isinstance(types, list) or len(types) != num or set(types) - {SLIDING, FULL}:
        raise ValueError(f"`layer_types` is {types!r}, and must name {SLIDING!r} or {FULL!r} for {num} layers")
    if SLIDING in types and (type(window) is not int or window < 1):
        name = "swa_window_size" if entries.get("use_swa") else "sliding_window"
        raise ValueError(f"`{name}` must be a positive integer for {SLIDING!r}, got {window!r}")
    return types, tuple(window if kind == SLIDING else None for kind in types)


def _causal(entries: Mapping[str, Any], types: Sequence[str]) -> tuple[bool, ...]:
    """Return for each layer whether slots see the earlier ones only."""
    for name in ("is_causal", "causal"):
        if entries.get(name) is not None:
            return (bool(entries[name]),) * len(types)
    if entries.get("causal_head"):
        return (True,) * len(types)
    are_both_ways = entries.get("sliding_window_non_causal")
    if are_both_ways is None:
        are_both_ways = entries.get("use_swa") or entries.get("model_type") == MUSE
        are_both_ways = are_both_ways or entries.get("speculators_model_type") == DFLASH2
    return tuple(kind == SLIDING and not are_both_ways for kind in types)


def _have_sinks(entries: Mapping[str, Any], shapes: Collection[str], windows: Sequence[int | None]) -> tuple[bool, ...]:
    """Return for each layer whether it has a sink: by tensors, and where there are none, by the config."""
    found = tuple(f"layers.{number}.self_attn.{SINK}" in shapes for number in range(len(windows)))
    if any(found) or not any(entries.get(name) for name in _SINKS):
        return found
    return tuple(window is not None or bool(entries.get(SINK)) for window in windows)


def _hidden_layers(
    entries: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], target_hidden: int, target: PreTrainedModel
) -> tuple[int, ...]:
    """
    Return the target's hidden states that the drafter reads (2: the input of decoder layer 2), from a list of layers
    whose outputs these are, or one of layers whose inputs these are.
    """
    num = target.config.get_text_config(decoder=True).num_hidden_layers
    inputs_name = next((name for name in INPUTS if entries.get(name)), INPUTS[0])
    outputs, inputs = _ids(entries, OUTPUTS, -1, num - 1), _ids(entries, inputs_name, 0, num)
    by_outputs = None if outputs is None else [number + 1 for number in outputs]
    # What a last layer leaves has no layer that reads it, and converters leave it out.
    if inputs and by_outputs and inputs not in (by_outputs, [number for number in by_outputs if number < num]):
        raise ValueError(f"`{OUTPUTS}` {outputs} and `{inputs_name}` {inputs} contradict one another: {by_outputs}")
    found = inputs or by_outputs
    if not found:
        counted = _integers(entries, {"num_target_layers": num})["num_target_layers"]
        found = default_layers(counted, entries["num_hidden_layers"])
        if not all(0 <= layer <= num for layer in found):
            raise ValueError(
                f"a drafter that reads layers {found}, of a target of {counted}, does not fit one of {num}"
            )
    reads, each = shapes.get("fc.weight", (0, 0))[-1], shapes.get(_ADAPTER, (target_hidden,))[0]
    if reads and reads != len(found) * each:
        raise ValueError(
            f"`fc.weight` reads {reads} numbers, and {len(found)} layers of the target {found} have {each} each"
        )
    return tuple(found)


def _ids(entries: Mapping[str, Any], name: str, least: int, most: int) -> list[int] | None:
    ids = entries.get(name)
    if not ids:
        return None
    if not isinstance(ids, list) or not all(type(number) is int and least <= number <= most for number in ids):
        raise ValueError(f"`{name}` is {ids!r}, and must be a list of integers from {least} to {most} for this target")
    return ids


def default_layers(num_target_layers: int, num_layers: int) -> list[int]:
    """Return the hidden states that a drafter of `num_layers` layers reads by default, evenly over the target's."""
    if num_layers == 1:
        return [num_target_layers // 2 + 1]
    step = (num_target_layers - 4) / (num_layers - 1)
    return [round(1 + number * step) + 1 for number in range(num_layers)]


def _mask_token(entries: Mapping[str, Any], target: PreTrainedModel) -> int:
    token, text = entries.get("mask_token_id"), entries.get("mask_token")
    if token is None and isinstance(text, str):
        tokenizer = AutoTokenizer.from_pretrained(target.config.name_or_path)
        token = tokenizer.get_vocab().get(text)
        if token is None:
            raise ValueError(f"`mask_token` {text!r} is no token of the target {target.config.name_or_path!r}")
    if type(token) is not int or token < 0:
        raise ValueError(f"`mask_token_id` must be a token, and is {token!r}")
    return token


def is_block_config(config: Mapping[str, Any]) -> bool:
    """Return whether a `config.json` is that of a block drafter."""
    kind = config.get("speculators_model_type")
    if kind is not None:
        return kind in _SPECULATORS
    entries = entries_of(config)
    signs: Collection[str] = ("mask_token_id", "mask_token", OUTPUTS, *INPUTS, "markov_rank", "projector_type")
    return "block_size" in entries and any(entries.get(name) is not None for name in signs)
