"""EAGLE's heads as their authors, SpecForge and speculators compute and store them, written down in plain torch."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file

EPS, THETA = 1e-5, 5000.0
ACTIVATIONS = {
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "tanh": torch.tanh,
}


@dataclass
class Published:
    """
    Tensors under short names, those of further layers after the layer's number, and what a config says of them. With
    `third`, these are heads of EAGLE-3, which look at `layers` of the target's hidden states. In the layers `sliding`,
    tokens see the last `window` up to their own, if that is given.
    """

    tensors: dict[str, torch.Tensor]
    third: bool
    heads: int
    kv_heads: int
    head_dim: int
    layers: Sequence[int] = (-1,)
    token_ids: torch.Tensor | None = None
    norm_before_residual: bool = False
    window: int | None = None
    config: dict = field(default_factory=dict)
    activation: str = "silu"
    num_layers: int = 1
    sliding: Sequence[int] = (0,)
    norm_output: bool = False
    mask_token: int | None = None

    def inputs(self, embeds: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What attention reads, and what it adds to."""
        if not self.third:
            x = self._linear("fc", torch.cat([embeds, features], dim=-1))
            return x, x
        normed = self._norm("hidden_norm", features)
        x = torch.cat([self._norm("input_layernorm", embeds), normed], dim=-1)
        return x, normed if self.norm_before_residual else features

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        if self.third and "input_norm.weight" in self.tensors:
            states = self._norm("input_norm", states)
        if self.third and "fc_norm.0.weight" in self.tensors:
            parts = states.chunk(len(self.layers), dim=-1)
            states = torch.cat([self._norm(f"fc_norm.{number}", part) for number, part in enumerate(parts)], dim=-1)
        return self._linear("fc", states) if self.third else states

    def run(
        self, embeds: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, sees: torch.Tensor
    ) -> torch.Tensor:
        """What tokens `[n, hidden]` leave that see others by `sees` `[n, n]`, which is asked row by row."""
        x, hidden = self.inputs(embeds, features)
        for number in range(self.num_layers):
            prefix, near = f"{number}." if number else "", sees
            if number:
                x = self._norm(f"{prefix}input_layernorm", hidden)
            if self.window is not None and number in self.sliding:
                near = sees & (positions[:, None] - positions < self.window)
            hidden = self._layer(prefix, x, hidden, positions, near)
        return self._norm("norm", hidden) if self.norm_output else hidden

    def _layer(
        self, prefix: str, x: torch.Tensor, residual: torch.Tensor, positions: torch.Tensor, sees: torch.Tensor
    ) -> torch.Tensor:
        query, key = self._heads(f"{prefix}q_proj", x, self.heads), self._heads(f"{prefix}k_proj", x, self.kv_heads)
        value = self._heads(f"{prefix}v_proj", x, self.kv_heads)
        if f"{prefix}q_norm.weight" in self.tensors:
            query, key = self._norm(f"{prefix}q_norm", query), self._norm(f"{prefix}k_norm", key)
        query, key = self._rotated(query, positions), self._rotated(key, positions)
        outputs = []
        for head in range(self.heads):
            group = head // (self.heads // self.kv_heads)
            scores = query[:, head] @ key[:, group].T / math.sqrt(self.head_dim)
            outputs.append(scores.masked_fill(~sees, -math.inf).softmax(-1) @ value[:, group])
        hidden = residual + self._linear(f"{prefix}o_proj", torch.cat(outputs, dim=-1))
        x = self._norm(f"{prefix}post_attention_layernorm", hidden)
        gate = ACTIVATIONS[self.activation](self._linear(f"{prefix}gate_proj", x))
        return hidden + self._linear(f"{prefix}down_proj", gate * self._linear(f"{prefix}up_proj", x))

    def logits(self, hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        """With the target's output weight, unless there is one of their own."""
        if self.third and not self.norm_output:
            hidden = self._norm("norm", hidden)
        return hidden @ self.tensors.get("lm_head.weight", head).T

    def embeds(self, tokens: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return self.tensors.get("embed_tokens.weight", table)[tokens]

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self.tensors[f"{name}.weight"].T + self.tensors.get(f"{name}.bias", 0)

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt(x.square().mean(-1, keepdim=True) + EPS) * self.tensors[f"{name}.weight"]

    def _heads(self, name: str, x: torch.Tensor, num: int) -> torch.Tensor:
        return self._linear(name, x).view(len(x), num, self.head_dim)

    def _rotated(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Pairs (j, j + head_dim / 2) turn by position / theta ** (2 j / head_dim)."""
        half = self.head_dim // 2
        speeds = THETA ** (-torch.arange(half).double() / half)
        turn = torch.polar(torch.ones(1).double(), positions.double()[:, None] * speeds)[:, None]
        turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * turn
        return torch.cat([turned.real, turned.imag], dim=-1).to(x.dtype)


def text_logits(
    heads: Published, target, text: torch.Tensor, states: torch.Tensor, tree: tuple[Sequence[int], Sequence[int]]
) -> torch.Tensor:
    """
    Logits `[n - 1 + nodes, own vocab]` of a whole text `[n]` with the target's hidden states `[n - 1, ...]` and of a
    draft (tokens, parents) behind it: position i takes token i + 1 and feature i, a node what its parent left.
    """
    table, output = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    tokens, parents = tree
    num, num_nodes = len(text) - 1, len(tokens)
    sees = torch.zeros(num + num_nodes, num + num_nodes, dtype=torch.bool)
    sees[:num, :num] = torch.ones(num, num).tril().bool()
    positions = torch.arange(num + num_nodes)
    for node, parent in enumerate(parents):
        above = num + parent if parent >= 0 else num - 1
        sees[num + node] = sees[above]
        sees[num + node, num + node] = True
        positions[num + node] = positions[above] + 1
    embeds = heads.embeds(torch.cat([text[1:], torch.tensor(tokens, dtype=torch.long)]), table)
    features = torch.cat([heads.combine(states), torch.zeros(num_nodes, embeds.shape[1])])
    hidden = heads.run(embeds, features, positions, sees)
    for _ in range(num_nodes):  # as many levels as there can be
        for node, parent in enumerate(parents):
            features[num + node] = hidden[num + parent if parent >= 0 else num - 1]
        hidden = heads.run(embeds, features, positions, sees)
    return heads.logits(hidden, output)


def parallel_logits(heads: Published, target, text: torch.Tensor, states: torch.Tensor, num: int) -> torch.Tensor:
    """
    Logits `[num, own vocab]` of P-EAGLE's depths after a text `[n]` with hidden states `[n - 1, ...]`: the first as
    EAGLE-3's, each further one from the mask token and `mask_hidden`, seeing the text and the depths before it.
    """
    length = len(text) - 1
    tokens = torch.cat([text[1:], torch.full((num - 1,), heads.mask_token)])
    masks = heads.tensors["mask_hidden"].view(1, -1).expand(num - 1, -1)
    embeds = heads.embeds(tokens, target.get_input_embeddings().weight)
    features, positions = heads.combine(torch.cat([states, masks])), torch.arange(length + num - 1)
    hidden = heads.run(embeds, features, positions, positions[:, None] >= positions)
    return heads.logits(hidden[length - 1 :], target.get_output_embeddings().weight)


def random_heads(
    hidden: int,
    vocab: int,
    *,
    third: bool = False,
    has_bias: bool = False,
    has_norms: bool = False,
    has_input_norm: bool = False,
    has_fc_norm: bool = False,
    norm_output: bool = False,
    num_layers: int = 1,
    sliding: Sequence[int] = (0,),
    mask_token: int | None = None,
    own_vocab: int | None = None,
    head_dim: int = 8,
    inner: int | None = None,
    layers: Sequence[int] = (-1,),
    norm_before_residual: bool = False,
    window: int | None = None,
    activation: str = "silu",
    seed: int = 0,
) -> Published:
    """4 heads that share 2 keys. With `own_vocab`, an output of so many tokens, in no particular places."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    def norm(size):
        return 1 + torch.randn(size, generator=generator) / 4

    inner, reads = inner or hidden + 8, 2 * hidden if third else hidden
    maps = {"fc": (hidden, len(layers) * hidden if third else 2 * hidden), "q_proj": (4 * head_dim, reads)}
    maps |= {"k_proj": (2 * head_dim, reads), "v_proj": (2 * head_dim, reads), "o_proj": (hidden, 4 * head_dim)}
    maps |= {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    tensors = {f"{name}.weight": normal(*shape) for name, shape in maps.items()}
    for number in range(1, num_layers):
        further = {name: (rows, hidden if name[0] in "qkv" else size) for name, (rows, size) in maps.items()}
        tensors |= {f"{number}.{name}.weight": normal(*further[name]) for name in maps if name != "fc"}
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{number}.{name}.weight"] = norm(hidden)
        if has_norms:
            tensors |= {f"{number}.{name}.weight": norm(head_dim) for name in ("q_norm", "k_norm")}
    if has_bias:
        tensors["fc.bias"] = normal(hidden)
    for name in ("input_layernorm", "hidden_norm", "norm", "post_attention_layernorm")[0 if third else 3 :]:
        tensors[f"{name}.weight"] = norm(hidden)
    if has_norms:
        tensors |= {"q_norm.weight": norm(head_dim), "k_norm.weight": norm(head_dim)}
    if has_input_norm:
        tensors["input_norm.weight"] = norm(len(layers) * hidden)
    if has_fc_norm:
        tensors |= {f"fc_norm.{number}.weight": norm(hidden) for number in range(len(layers))}
    if mask_token is not None:
        tensors["mask_hidden"] = torch.randn(1, 1, len(layers) * hidden, generator=generator)
    token_ids = None
    if own_vocab is not None:
        token_ids = torch.randperm(vocab, generator=generator)[:own_vocab].sort().values
        tensors["lm_head.weight"] = normal(own_vocab, hidden) * 3
    sizes, options = (4, 2, head_dim), {"num_layers": num_layers, "sliding": sliding, "norm_output": norm_output}
    options |= {"activation": activation, "mask_token": mask_token}
    return Published(tensors, third, *sizes, layers, token_ids, norm_before_residual, window, **options)


def layer_config(heads: Published, vocab: int, is_explicit: bool = True) -> dict:
    """Of a Llama of one layer; sizes of heads are named, or follow from others."""
    hidden = heads.tensors["o_proj.weight"].shape[0]
    config = {
        "hidden_size": hidden,
        "intermediate_size": heads.tensors["gate_proj.weight"].shape[0],
        "num_attention_heads": heads.heads,
        "num_key_value_heads": heads.kv_heads,
        "num_hidden_layers": heads.num_layers,
        "hidden_act": heads.activation,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "vocab_size": vocab,
        "max_position_embeddings": 2048,
        "model_type": "llama",
    }
    if heads.window is not None:
        kinds = [f"{'sliding' if number in heads.sliding else 'full'}_attention" for number in range(heads.num_layers)]
        config |= {"layer_types": kinds, "sliding_window": heads.window}
    return config | ({"head_dim": heads.head_dim} if is_explicit else {})


def _long(tensors: dict[str, torch.Tensor], layer: str) -> dict[str, torch.Tensor]:
    """Names within the layer: what is of attention, of the MLP, and else."""
    inner = {name: "self_attn." for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")}
    inner |= {name: "mlp." for name in ("gate_proj", "up_proj", "down_proj")}
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    found = {}
    for name, item in tensors.items():
        number, _, own = name.partition(".") if name[0].isdecimal() else ("", "", name)
        part, place = own.rpartition(".")[0], f"layers.{number}." if number else layer
        found[f"{place}{inner.get(part, '')}{own}" if part in inner or part in norms else name] = item.clone()
    return found


def _vocabulary(heads: Published, vocab: int) -> dict[str, torch.Tensor]:
    """`d2t` says how much further a token stands among the target's, `t2d` which of these there are."""
    if heads.token_ids is None:
        return {}
    known = torch.zeros(vocab, dtype=torch.bool)
    known[heads.token_ids] = True
    return {"d2t": heads.token_ids - torch.arange(len(heads.token_ids)), "t2d": known}


def _first(heads: Published, vocab: int, folder: Path) -> None:
    """EAGLE-1 and 2: pickled, with embeddings, and the config of a Llama without a word of EAGLE."""
    torch.save(_long(heads.tensors, "layers.0."), folder / "pytorch_model.bin")
    config = layer_config(heads, vocab, is_explicit="head_dim" in heads.config)
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))


def _third(heads: Published, vocab: int, folder: Path) -> None:
    torch.save(_long(heads.tensors, "midlayer.") | _vocabulary(heads, vocab), folder / "pytorch_model.bin")
    config = layer_config(heads, vocab, is_explicit="head_dim" in heads.config)
    own = vocab if heads.token_ids is None else len(heads.token_ids)
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": own}
    (folder / "config.json").write_text(json.dumps(config))


def _spec_forge(heads: Published, vocab: int, folder: Path) -> None:
    """Layers are counted by what they leave."""
    save_file(_long(heads.tensors, "midlayer.") | _vocabulary(heads, vocab), folder / "model.safetensors")
    ids = {"eagle_aux_hidden_state_layer_ids": [number - 1 for number in heads.layers]}
    config = layer_config(heads, vocab) | {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": ids}
    (folder / "config.json").write_text(json.dumps(config | {"draft_vocab_size": len(heads.token_ids)}))


def _speculators(heads: Published, vocab: int, folder: Path) -> None:
    others = {"verifier_norm.weight": torch.ones(heads.tensors["norm.weight"].shape)}
    save_file(_long(heads.tensors, "layers.0.") | _vocabulary(heads, vocab) | others, folder / "model.safetensors")
    config = {
        "speculators_model_type": "eagle3" if heads.mask_token is None else "peagle",
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": vocab if heads.token_ids is None else len(heads.token_ids),
        "eagle_aux_hidden_state_layer_ids": list(heads.layers),
        "norm_before_residual": heads.norm_before_residual,
        "norm_before_fc": "input_norm.weight" in heads.tensors,
        "fc_norm": "fc_norm.0.weight" in heads.tensors,
        "norm_output": heads.norm_output,
        "transformer_layer_config": layer_config(heads, vocab) | {"model_type": "qwen3"},
    }
    if heads.mask_token is not None:
        methods = [{"proposal_type": "greedy", "speculative_tokens": 6}]
        config |= {"mask_token_id": heads.mask_token, "speculators_config": {"proposal_methods": methods}}
    (folder / "config.json").write_text(json.dumps(config))


LAYOUTS = {"1": _first, "3": _third, "SpecForge": _spec_forge, "speculators": _speculators}
