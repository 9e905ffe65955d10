"""Block drafters as their authors and speculators compute and store them, written down in plain torch."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from .shapes import convolution_shapes, domino_shapes, markov_shapes, selector_shapes, shapes, xpress_shapes

EPS, THETA = 1e-6, 10000.0
_NESTED = ("output_multiplier", "final_logit_softcapping", "input_embedding_scale")  # at the top they are the target's
_NESTED += ("attention_sink_bias", "attention_value_scale", "backbone_rotary_base")


@dataclass
class Published:
    """
    Tensors under z-lab's names, and what a config says of them. `outputs` are the layers of the target whose outputs
    are read. `types` are of the layers ("s": sliding, "f": full).
    """

    tensors: dict[str, torch.Tensor]
    heads: int
    kv_heads: int
    head_dim: int
    outputs: Sequence[int]
    block_size: int
    mask_token: int
    causal: Sequence[bool]
    windows: Sequence[int | None]
    from_anchor: bool = False
    token_ids: torch.Tensor | None = None
    config: dict = field(default_factory=dict)  # further entries
    turned: int | None = None  # numbers of a head that rotary embeddings turn; all by default

    @property
    def hidden(self) -> int:
        return self.tensors["fc.weight"].shape[0]

    @property
    def num_layers(self) -> int:
        return len(self.causal)

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        if "aux_hidden_norms.0.weight" in self.tensors:
            parts = states.chunk(len(self.outputs), dim=-1)
            states = torch.cat([self._norm(f"aux_hidden_norms.{k}", part) for k, part in enumerate(parts)], dim=-1)
        if "hidden_dim_adapter.proj.weight" in self.tensors:
            parts = states.chunk(len(self.outputs), dim=-1)
            states = torch.cat([self._linear("hidden_dim_adapter.proj", part) for part in parts], dim=-1)
        return self._norm("hidden_norm", states @ self.tensors["fc.weight"].T)

    def block(self, states: torch.Tensor, embeds: torch.Tensor, start: int) -> torch.Tensor:
        """
        Hidden states after the final norm of slots with `embeds` `[S, hidden]` at positions `start` and further, after
        positions up to there whose target's `states` are `[start, K * hidden]`.
        """
        context, x, num = self.combine(states), embeds, len(embeds)
        positions = torch.arange(start + num)
        for layer in range(self.num_layers):
            sees = torch.ones(num, start + num, dtype=torch.bool)
            for slot in range(num):
                for place in range(start + num):
                    if self.causal[layer] and place > start + slot:
                        sees[slot, place] = False
                    window = self.windows[layer]
                    if window is not None and place <= start + slot - window:
                        sees[slot, place] = False
            x = self._layer(layer, x, context, positions, sees)
        return self._norm("norm", x)

    def _layer(self, layer, x, context, positions, sees):
        name = f"layers.{layer}"
        is_gemma = f"{name}.layer_scalar" in self.tensors
        h = u = self._norm(f"{name}.input_layernorm", x)
        h = self._convolved(f"{name}.attention_conv", 0, u, h)
        if "aux_hidden_norms.0.weight" in self.tensors:  # Laguna
            context = self._norm(f"{name}.input_layernorm", context)
        both = torch.cat([context, h])
        query = self._heads(f"{name}.self_attn.q_proj", h, self.heads)
        key = value = self._heads(f"{name}.self_attn.k_proj", both, self.kv_heads)
        if f"{name}.self_attn.v_proj.weight" in self.tensors:
            value = self._heads(f"{name}.self_attn.v_proj", both, self.kv_heads)
        if is_gemma:
            value = value / torch.sqrt(value.square().mean(-1, keepdim=True) + EPS)
        query = self._rotated(self._norm(f"{name}.self_attn.q_norm", query), positions[len(context) :])
        key = self._rotated(self._norm(f"{name}.self_attn.k_norm", key), positions)
        value = value * self.config.get("attention_value_scale", 1.0)
        outputs = []
        for head in range(self.heads):
            group = head // (self.heads // self.kv_heads)
            scores = query[:, head] @ key[:, group].T / (1 if is_gemma else math.sqrt(self.head_dim))
            scores = scores.masked_fill(~sees, -math.inf)
            if f"{name}.self_attn.attention_sink_bias" in self.tensors:
                sink = self.tensors[f"{name}.self_attn.attention_sink_bias"][head]
                scores = torch.cat([scores, sink.expand(len(scores), 1)], dim=1)
            outputs.append(scores.softmax(-1)[:, : len(value)] @ value[:, group])
        attended = torch.cat(outputs, dim=-1)
        if f"{name}.self_attn.g_proj.weight" in self.tensors:
            gate = torch.log1p(torch.exp(self._linear(f"{name}.self_attn.g_proj", h)))
            attended = attended * gate.repeat_interleave(attended.shape[1] // gate.shape[1], dim=1)
        output = self._linear(f"{name}.self_attn.o_proj", attended)
        if is_gemma:
            x = x + self._norm(f"{name}.post_attention_layernorm", output)
            z = self._norm(f"{name}.pre_feedforward_layernorm", x)
            gate = torch.nn.functional.gelu(self._linear(f"{name}.mlp.gate_proj", z), approximate="tanh")
            output = self._linear(f"{name}.mlp.down_proj", gate * self._linear(f"{name}.mlp.up_proj", z))
            x = x + self._norm(f"{name}.post_feedforward_layernorm", output)
            return x * self.tensors[f"{name}.layer_scalar"]
        x = x + self._convolved(f"{name}.attention_conv", 1, u, output)
        z = u = self._norm(f"{name}.post_attention_layernorm", x)
        z = self._convolved(f"{name}.mlp_conv", 0, u, z)
        gate = self._linear(f"{name}.mlp.gate_proj", z)
        inner = gate * torch.sigmoid(gate) * self._linear(f"{name}.mlp.up_proj", z)
        return x + self._convolved(f"{name}.mlp_conv", 1, u, self._linear(f"{name}.mlp.down_proj", inner))

    def _rotated(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        num = self.head_dim if self.turned is None else self.turned
        return torch.cat([rotated(heads[..., :num], positions), heads[..., num:]], dim=-1)

    def _convolved(self, name: str, which: int, u: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """DFlash2's: before (0) or after (1) a part whose input is `u`."""
        if f"{name}.base_kernel" not in self.tensors:
            return x
        base = self.tensors[f"{name}.base_kernel"]
        _, size, hidden = base.shape
        coefficients = (u @ self.tensors[f"{name}.kernel_projection.weight"].T).view(len(u), 2, size, -1)
        groups = torch.arange(hidden) // (hidden // coefficients.shape[-1])
        result = torch.zeros_like(x)
        for slot in range(len(x)):
            for back in range(min(size, slot + 1)):
                factor = base[which, back] + coefficients[slot, which, back, groups]
                result[slot] += factor * x[slot - back]
        return result

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self.tensors[f"{name}.weight"].T + self.tensors.get(f"{name}.bias", 0)

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt(x.square().mean(-1, keepdim=True) + EPS) * self.tensors[f"{name}.weight"]

    def _heads(self, name: str, x: torch.Tensor, num: int) -> torch.Tensor:
        return self._linear(name, x).view(len(x), num, self.head_dim)


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Pairs (j, j + head_dim / 2) turn by position / theta ** (2 j / head_dim)."""
    half = x.shape[-1] // 2
    speeds = THETA ** (-torch.arange(half).double() / half)
    turn = torch.polar(torch.ones(1).double(), positions.double()[:, None] * speeds)[:, None]
    turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * turn
    return torch.cat([turned.real, turned.imag], dim=-1).to(x.dtype)


def markov_step(
    tensors: Mapping, token: int, state: torch.Tensor, h: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return DSpark's addition to the logits of a slot after a token, and the state at the next slot."""
    own = {name.removeprefix("markov_head."): item for name, item in tensors.items()}
    e, added = own["markov_w1.weight"][token], own["markov_w1.weight"][token]
    if "gate_proj.weight" in own:
        added = torch.sigmoid(own["gate_proj.weight"] @ torch.cat([h, e]) + own["gate_proj.bias"]) * e
    if "joint_proj.weight" in own:
        z, u, o = (own["joint_proj.weight"] @ torch.cat([state, e, h]) + own["joint_proj.bias"]).chunk(3)
        state = torch.sigmoid(z) * state + (1 - torch.sigmoid(z)) * torch.tanh(u)
        added = torch.tanh(o)
    return own["markov_w2.weight"] @ added, state


def random_drafter(
    hidden: int,
    vocab: int,
    *,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    outputs: Sequence[int] = (0, 1),
    block_size: int = 6,
    causal: bool | Sequence[bool] = False,
    windows: Sequence[int | None] | None = None,
    from_anchor: bool = False,
    own_vocab: int | None = None,
    has_bias: bool = False,
    has_embedding: bool = False,
    convolution: tuple[int, int] | None = None,
    selector_rank: int | None = None,
    markov: str | None = None,
    markov_rank: int = 4,
    confidence: str | None = None,
    is_domino: bool = False,
    is_xpress: bool = False,
    gemma: bool | None = None,
    gate: int | None = None,
    has_adapter: bool = False,
    has_sinks: bool = False,
    turned: int | None = None,
    config: Mapping | None = None,
    seed: int = 0,
) -> Published:
    """
    A drafter of plain DFlash, unless it has DFlash2's `convolution` (size, group) and selector, or DSpark's `markov`
    head ("vanilla", "gated", "rnn") and `confidence` ("hidden": by hidden states; "markov": by the token before, too).
    With `gemma`, layers of Gemma 4 whose values are keys, too (True), or not; with `gate`, Laguna's, of so many rows.
    With `has_sinks`, attention is MiMo's; `turned` numbers of a head are turned by rotary embeddings.
    With `own_vocab`, an output of so many tokens, in no particular places.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    all_shapes = shapes(hidden, len(outputs) * hidden, layers, heads, kv_heads, head_dim, hidden + 8)
    entries = {}
    if convolution is not None:
        all_shapes |= convolution_shapes(hidden, layers, *convolution)
        entries |= {"conv_kernel_size": convolution[0], "conv_group_size": convolution[1]}
    if selector_rank is not None:
        all_shapes |= selector_shapes(vocab, hidden, selector_rank)
        entries |= {"selector_rank": selector_rank, "selector_top_k": 5}
    if markov is not None:
        all_shapes |= markov_shapes(markov, vocab, own_vocab or vocab, hidden, markov_rank)
        entries |= {"markov_rank": markov_rank, "markov_head_type": markov}
    if gemma is not None:
        for layer in range(layers):
            all_shapes |= {f"layers.{layer}.{side}_feedforward_layernorm.weight": (hidden,) for side in ("pre", "post")}
            all_shapes[f"layers.{layer}.layer_scalar"] = (1,)
            if gemma:
                del all_shapes[f"layers.{layer}.self_attn.v_proj.weight"]
        entries |= {"attention_k_eq_v": gemma, "global_head_dim": head_dim, "num_global_key_value_heads": kv_heads}
        entries |= {"head_dim": 2, "hidden_activation": "gelu_pytorch_tanh"}
        entries |= {"num_key_value_heads": 1} if gemma else {}
        entries["rope_parameters"] = {"full_attention": {"rope_type": "default", "rope_theta": THETA}}
    if gate is not None:
        all_shapes |= {f"layers.{layer}.self_attn.g_proj.weight": (gate, hidden) for layer in range(layers)}
        all_shapes |= {f"aux_hidden_norms.{k}.weight": (hidden,) for k in range(len(outputs))}
    if has_sinks:  # MiMo's
        all_shapes |= {f"layers.{layer}.self_attn.attention_sink_bias": (heads,) for layer in range(layers)}
        entries |= {"attention_sink_bias": True, "attention_value_scale": 0.6}
    if turned is not None:
        entries |= {"partial_rotary_factor": turned / head_dim, "rope_theta": 7.0, "backbone_rotary_base": THETA}
    if has_adapter:
        all_shapes["hidden_dim_adapter.proj.weight"] = (hidden, hidden)
    if is_domino:
        all_shapes |= domino_shapes(own_vocab or vocab, hidden, 5, 3)
        entries |= {"projector_type": "domino", "shift_label": from_anchor}
    if is_xpress:
        all_shapes |= xpress_shapes(vocab, own_vocab or vocab, hidden, 4, 8, block_size)
        entries |= {"xpress_rank": 4, "num_jacobi_passes": 3}
    if confidence is not None:
        reads = hidden + (markov_rank if confidence == "markov" else 0)
        all_shapes |= {"confidence_head.proj.weight": (1, reads), "confidence_head.proj.bias": (1,)}
        entries |= {"enable_confidence_head": True, "confidence_head_with_markov": confidence == "markov"}
    for name, shape in all_shapes.items():
        tensors[name] = torch.randn(shape, generator=generator)
        tensors[name] = 1 + tensors[name] / 4 if "norm" in name else tensors[name] / shape[-1] ** 0.5
        if has_bias and "_proj" in name and "self_attn" in name:
            tensors[name.replace("weight", "bias")] = torch.randn(shape[0], generator=generator) / 4
    token_ids = None
    if own_vocab is not None:
        token_ids = torch.randperm(vocab, generator=generator)[:own_vocab].sort().values
        tensors["lm_head.weight"] = torch.randn(own_vocab, hidden, generator=generator)
    if has_embedding:
        tensors["embed_tokens.weight"] = torch.randn(vocab, hidden, generator=generator)
    causal = [causal] * layers if isinstance(causal, bool) else causal
    windows = [None] * layers if windows is None else windows
    entries |= ({"attention_bias": True} if has_bias else {}) | dict(config or {})
    slots = block_size, vocab - 1, causal, windows, from_anchor
    return Published(tensors, heads, kv_heads, head_dim, outputs, *slots, token_ids, entries, turned)


def layer_config(drafter: Published, vocab: int) -> dict:
    """Entries of the layers, as Qwen3's."""
    config = {
        "model_type": "qwen3",
        "hidden_size": drafter.hidden,
        "intermediate_size": drafter.tensors["layers.0.mlp.gate_proj.weight"].shape[0],
        "num_hidden_layers": drafter.num_layers,
        "num_attention_heads": drafter.heads,
        "num_key_value_heads": drafter.kv_heads,
        "head_dim": drafter.head_dim,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "vocab_size": vocab,
        "max_position_embeddings": 2048,
    }
    if any(drafter.windows):
        config["layer_types"] = ["sliding_attention" if window else "full_attention" for window in drafter.windows]
        config["sliding_window"] = next(window for window in drafter.windows if window)
    return config


def vocabulary(drafter: Published, vocab: int) -> dict[str, torch.Tensor]:
    """`d2t` says how much further a token stands among the target's, `t2d` which of these there are."""
    if drafter.token_ids is None:
        return {}
    known = torch.zeros(vocab, dtype=torch.bool)
    known[drafter.token_ids] = True
    return {"d2t": drafter.token_ids - torch.arange(len(drafter.token_ids)), "t2d": known}


def _slots(drafter: Published) -> dict:
    own = {"block_size": drafter.block_size, "mask_token_id": drafter.mask_token}
    return own | ({"sample_from_anchor": True} if drafter.from_anchor else {})


def _causal(drafter: Published) -> dict:
    """Return a config's entries for masks: none where they are the usual ones, by types of layers."""
    usual = [window is not None for window in drafter.windows]
    return {} if list(drafter.causal) == usual else {"is_causal": drafter.causal[0]}


def _save(folder: Path, tensors: Mapping[str, torch.Tensor], config: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: item.clone().contiguous() for name, item in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def z_lab(drafter: Published, vocab: int, folder: Path) -> None:
    own = {"target_layer_ids": list(drafter.outputs)} | _slots(drafter)
    own |= {name: value for name, value in drafter.config.items() if name in _NESTED}
    config = layer_config(drafter, vocab) | {"architectures": ["DFlashDraftModel"], "dflash_config": own}
    config |= {"block_size": own.pop("block_size"), "num_target_layers": 2} | _causal(drafter) | drafter.config
    if drafter.token_ids is not None:
        config["draft_vocab_size"] = len(drafter.token_ids)
    _save(folder, drafter.tensors | vocabulary(drafter, vocab), config)


def prefixed(drafter: Published, vocab: int, folder: Path) -> None:
    """All at the top, names with a prefix, fused maps, copies of rotary frequencies."""
    tensors = {}
    for name, item in drafter.tensors.items():
        layer, _, part = name.rpartition("self_attn.")
        if part in ("k_proj.weight", "v_proj.weight") or name.endswith("up_proj.weight"):
            continue
        if part == "q_proj.weight":
            parts = [drafter.tensors[f"{layer}self_attn.{kind}_proj.weight"] for kind in "qkv"]
            name, item = f"{layer}self_attn.qkv_proj.weight", torch.cat(parts)
        elif name.endswith("gate_proj.weight"):
            up = drafter.tensors[name.replace("gate_proj", "up_proj")]
            name, item = name.replace("gate_proj", "gate_up_proj"), torch.cat([item, up])
        tensors[f"model.{name}"] = item
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    config = layer_config(drafter, vocab) | {
        "architectures": ["DFlashDraftModel"],
        "target_layer_ids": list(drafter.outputs),
    }
    _save(folder, tensors, config | _slots(drafter) | _causal(drafter) | drafter.config)


def deepspec(drafter: Published, vocab: int, folder: Path) -> None:
    """All at the top, with copies of the target's embedding and head."""
    config = layer_config(drafter, vocab) | {"target_layer_ids": list(drafter.outputs)}
    config |= {"architectures": ["Qwen3DSparkModel"], "markov_rank": 0} | _causal(drafter)
    config |= {"block_size": drafter.block_size, "mask_token_id": drafter.mask_token}
    _save(folder, drafter.tensors | vocabulary(drafter, vocab), config | drafter.config)


def muse(drafter: Published, vocab: int, folder: Path) -> None:
    """transformers' class; bidirectional, whatever the types of layers."""
    renamed = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    tensors = {renamed.get(name, name): item for name, item in drafter.tensors.items()}
    config = layer_config(drafter, vocab) | {
        "model_type": "muse_glimmer_assistant",
        "target_layer_ids": list(drafter.outputs),
    }
    config |= {"architectures": ["MuseGlimmerAssistantModel"]}
    _save(folder, tensors, config | _slots(drafter) | drafter.config)


def speculators(drafter: Published, vocab: int, folder: Path, kind: str = "dflash") -> None:
    """Layers are counted by what they read."""
    own = vocab if drafter.token_ids is None else len(drafter.token_ids)
    config = {
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "architectures": ["DFlashDraftModel"],
        "speculators_config": {"algorithm": kind, "verifier": {"name_or_path": "someone/target"}},
        "transformer_layer_config": layer_config(drafter, vocab),
        "draft_vocab_size": own,
        "target_hidden_size": None,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in drafter.outputs],
        "sliding_window_non_causal": not any(drafter.causal),
        "sample_from_anchor": drafter.from_anchor,
        "block_size": drafter.block_size,
        "mask_token_id": drafter.mask_token,
    }
    others = {"verifier_norm.weight": torch.ones(drafter.hidden)}
    _save(folder, drafter.tensors | vocabulary(drafter, vocab) | others, config | drafter.config)


LAYOUTS = {"z-lab": z_lab, "prefixed": prefixed, "deepspec": deepspec, "muse": muse}
LAYOUTS |= {
    f"speculators {kind}": partial(speculators, kind=kind) for kind in ("dflash", "dflash2", "dspark", "xpress")
}
