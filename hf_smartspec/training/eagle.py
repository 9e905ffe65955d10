"""Training of EAGLE-3's heads on their own features ("training-time test", arXiv 2503.01840, section 3.2)."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

from ..candidates.heads.eagle.config import default_layers, window_of
from ..candidates.heads.eagle.heads import EagleHeads
from ..target_model.compat import shared_value
from .accuracy import accuracy, likeliest
from .texts import IGNORED, Text

_DECAY = 0.8  # of the weight of each further step in the loss
_CALM = 0.3  # of the final norm's weights: logits that are too sure cost the first updates
_NOISE = 0.05  # of random weights beside those that pass a hidden state on
_ROPE = ("default", "linear", "llama3", "yarn")  # types that the heads copy from the target


def new_heads(
    target: PreTrainedModel, token_ids: torch.Tensor | None = None, neurons: int | None = None, seed: int = 0
) -> EagleHeads:
    """
    Return untrained EAGLE-3 heads in float32, with the target's attention heads and a copy of its output weights.
    Where the target's last layer is like theirs, they begin as it.

    Args:
        token_ids (`torch.Tensor` of shape `[own vocab]`, *optional*): Tokens that the heads may draft, ascending; all
            by default.
        neurons (`int`, *optional*): Intermediate size of the MLP; the target's by default.
        seed (`int`): Seed of the weights. torch's global generators are not used.

    Raises:
        ValueError: for a target whose output layer is quantized.
    """
    output: Any = target.get_output_embeddings()
    if not output.weight.is_floating_point():
        raise ValueError("The heads start from the target's output layer, which is quantized: train them before that.")
    config, layers = _layer_config(target, neurons), default_layers(target)
    size, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    generator = torch.Generator().manual_seed(seed)
    maps = {"fc": (size, len(layers) * size), "q_proj": (queries, 2 * size), "k_proj": (keys, 2 * size)}
    maps |= {"v_proj": (keys, 2 * size), "o_proj": (size, queries), "down_proj": (size, inner)}
    maps |= {"gate_proj": (inner, size), "up_proj": (inner, size)}
    tensors = {
        f"{name}.weight": torch.randn(shape, generator=generator) / shape[1] ** 0.5 for name, shape in maps.items()
    }
    for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm", "norm"):
        tensors[f"{norm}.weight"] = torch.ones(size)
    weight = output.weight.detach().float().cpu()
    _copy_last_layer(tensors, target)
    tensors["lm_head.weight"] = weight.clone() if token_ids is None else weight[token_ids]
    if token_ids is not None:
        tensors["d2t"] = token_ids - torch.arange(len(token_ids))
    return EagleHeads(config, tensors, layers, target).to(output.weight.device)


def _copy_last_layer(tensors: dict[str, torch.Tensor], target: PreTrainedModel) -> None:
    """
    Replace random weights by those of the target's final norm and last layer, as far as their shapes are the same, if
    that is a Llama's: features begin as the last hidden state that the heads read, which such a layer continues.
    """
    decoder: Any = target.get_decoder()
    layer: Any = decoder.layers[-1] if hasattr(decoder, "layers") else nn.Module()
    norms = {"hidden_norm": "input_layernorm", "post_attention_layernorm": "post_attention_layernorm"}
    sources = {name: f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")} | norms
    sources |= {name: f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")}
    weights = {name.removesuffix(".weight") for name, _ in layer.named_parameters() if name.endswith(".weight")}
    has_biases = any(name.endswith("norm.bias") for name, _ in layer.named_parameters())  # unlike RMS norms
    if weights != set(sources.values()) or has_biases or not hasattr(decoder, "norm"):
        return
    size = len(tensors["norm.weight"])
    ones = torch.ones(1, size, dtype=target.dtype, device=target.device)  # some norms add 1 to their weights
    tensors["norm.weight"] = _CALM * decoder.norm(ones)[0].detach().float().cpu()
    for name, source in sources.items():
        module, wanted = layer.get_submodule(source), tensors[f"{name}.weight"]
        found = module(ones)[0] if name in norms else module.weight
        own = wanted[:, size:] if name in ("q_proj", "k_proj", "v_proj") else wanted  # features, after embeddings
        if found.shape == own.shape:
            own.copy_(found.detach())
    fc = tensors["fc.weight"].mul_(_NOISE)
    fc[:, -size:] += torch.eye(size)


def _layer_config(target: PreTrainedModel, neurons: int | None) -> Any:
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
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=shared_value(config, "num_key_value_heads") or heads,
        head_dim=shared_value(config, "head_dim") or config.hidden_size // heads,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        max_position_embeddings=getattr(config, "max_position_embeddings", 2048),
        rope_parameters=rope if is_known and turns_all else None,
    )


def frequent_tokens(texts: Sequence[Text], num: int, vocab_size: int) -> torch.Tensor | None:
    """Return the `num` most frequent tokens of responses, ascending, int64 `[num]`; None if these are all tokens."""
    if num >= vocab_size:
        return None
    counts = np.bincount(np.concatenate([item.response for item in texts]), minlength=vocab_size)
    best = np.argsort(-counts, kind="stable")[:num]
    return torch.from_numpy(np.sort(best))


class EagleDrafts:
    """
    Drafts of EAGLE-3's heads after every token of texts, with gradients.

    Args:
        heads (`EagleHeads`): EAGLE-3's heads.
        num_steps (`int`): Tokens drafted after each token.
    """

    def __init__(self, heads: EagleHeads, num_steps: int):
        self.heads, self.num_steps, self._rotary = heads, num_steps, heads.rotary()

    def __call__(
        self, input_ids: torch.Tensor, labels: torch.Tensor, states: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """
        Draft `num_steps` tokens after each token of a batch.

        Args:
            input_ids, labels (`torch.Tensor` of shape `[rows, length]`): As `texts.collate` makes them.
            states (`torch.Tensor` of shape `[rows, length, layers * hidden]`): The target's hidden states.

        Yields:
            For every step, the logits `[n, own vocab]` of the positions that are trained on, and a mask of these
            positions, bool `[rows, length - step - 1]`. In step k, position i reads token i + k + 1, and the features
            that the step before has left at position i.
        """
        heads, length = self.heads, input_ids.shape[1]
        features, first = heads.combine(states), 0
        begin = max(int((labels != IGNORED).any(0).int().argmax()) - 2, 0)  # first position that is trained on
        memory: list[tuple[torch.Tensor, torch.Tensor]] = []
        for step in range(min(self.num_steps, length - 2)):
            end = length - step - 1
            positions = torch.arange(first + step, end + step, device=input_ids.device)[None]
            x, residual = heads.inputs(heads.embed(input_ids[:, first + step + 1 :]), features[:, : end - first])
            features = heads.layer_output(residual + self._attend(x, positions, first, memory))
            where = torch.zeros(input_ids.shape[0], end, dtype=torch.bool, device=input_ids.device)
            # Train on drafts that lie in the response as a whole.
            where[:, :-1] = (labels[:, 2 : end + 1] != IGNORED) & (labels[:, step + 2 :] != IGNORED)
            yield heads.logits(features[where[:, first:]]), where
            if step == 0:  # further steps run at trained positions only
                first, features = begin, features[:, begin:]

    def _attend(
        self, x: torch.Tensor, positions: torch.Tensor, first: int, memory: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        """
        Return attention outputs `[rows, n, hidden]` of the n positions from `first` on. A position attends to the text
        so far by keys of the first step, and to keys of later steps at the same position only, within the layer's
        window.
        """
        window, step = window_of(self.heads.config), len(memory)
        query, key, value = (self._split(name, x) for name in ("q_proj", "k_proj", "v_proj"))
        if "q_norm" in self.heads.parts:
            query, key = self.heads.parts["q_norm"](query), self.heads.parts["k_norm"](key)
        query, key = apply_rotary_pos_emb(query, key, *self._rotary(x, positions))
        groups, num = query.shape[1] // key.shape[1], x.shape[1]
        memory.append((repeat_kv(key, groups), repeat_kv(value, groups)))
        seen = memory[1:] if window is None else memory[1:][-window:]
        (keys, values), own = memory[0], [(keys[:, :, :num], values[:, :, :num]) for keys, values in seen]
        total = first + num
        scores = query @ keys[:, :, :total].transpose(2, 3)
        ones = torch.ones(num, total, dtype=torch.bool, device=x.device)
        is_hidden = ones.triu(first + 1)
        if window is not None:  # row i is the query of position `first + i + step`
            is_hidden |= ones.tril(first + step - window)
        scores = scores.masked_fill(is_hidden, -torch.inf)
        scores = torch.cat([scores, *[(query * keys).sum(-1, keepdim=True) for keys, _ in own]], dim=-1)
        weights = (scores.float() * query.shape[-1] ** -0.5).softmax(dim=-1).to(values.dtype)
        output = weights[..., :total] @ values[:, :, :total]
        for index, (_, values) in enumerate(own):
            output = output + weights[..., total + index, None] * values
        return self.heads.parts["o_proj"](output.transpose(1, 2).flatten(2))

    def _split(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Return the projection `name` of x, split into heads: `[rows, heads, n, head_dim]`."""
        return self.heads.parts[name](x).unflatten(2, (-1, self.heads.config.head_dim)).transpose(1, 2)


class EagleTraining(nn.Module):
    """
    Module whose forward returns the loss of heads that draft some steps from their own features. Only the heads are
    trained and saved; the target is frozen.

    Args:
        target (`PreTrainedModel`): A decoder.
        heads (`EagleHeads`): EAGLE-3's heads, in float32.
        num_steps (`int`): Tokens that the heads draft after each token of a text.

    Raises:
        ValueError: for heads that read the last layer's output, which transformers returns only after the final norm.
    """

    def __init__(self, target: PreTrainedModel, heads: EagleHeads, num_steps: int = 4):
        super().__init__()
        num_layers = target.config.get_text_config(decoder=True).num_hidden_layers
        if not all(0 <= layer < num_layers for layer in heads.hidden_layers):
            raise ValueError(f"Heads that read layers {heads.hidden_layers} of {num_layers} cannot be trained.")
        self.parts = heads.parts.requires_grad_(True)
        self.num_steps = num_steps
        self._frozen = target.eval().requires_grad_(False), heads  # in a tuple, so that they are no submodules
        self._drafts = EagleDrafts(heads, num_steps)

    @property
    def target(self) -> PreTrainedModel:
        return self._frozen[0]

    @property
    def heads(self) -> EagleHeads:
        return self._frozen[1]

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """
        Return the loss of a batch.

        Args:
            input_ids, labels (`torch.Tensor` of shape `[rows, length]`): As `texts.collate` makes them.

        Returns:
            `loss`: each step's mean cross-entropy with the target's distributions, weighted by 0.8 ** step, summed.
        """
        device = input_ids.device.type
        # Heads draft in a half-precision target's dtype, and are trained in it: several times as fast.
        with torch.autocast(device, self.target.dtype, enabled=self.target.dtype.itemsize == 2):
            states, hidden = self._target_states(input_ids)
            losses = [next(self.parts.parameters()).sum() * 0.0]  # a loss with gradients where texts are too short
            is_learnt = labels[:, 1:] != IGNORED
            probs = self._target_probs(hidden[:, :-1][is_learnt], input_ids[:, 1:][is_learnt])  # once for all steps
            places = is_learnt.flatten().cumsum(0).view_as(is_learnt) - 1
            for step, (logits, where) in enumerate(self._drafts(input_ids, labels, states)):
                if len(logits):
                    wanted = probs[places[:, step + 1 :][where[:, :-1]]]
                    losses.append(-(_DECAY**step) * (wanted * logits.float().log_softmax(dim=-1)).sum(-1).mean())
        return {"loss": torch.stack(losses).sum()}

    @torch.no_grad()
    def _target_states(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Return the target's hidden states `[rows, length, layers * hidden]` that the heads read, and its last ones,
        after the final norm, `[rows, length, hidden]`.
        """
        output = self.target.get_decoder()(input_ids=input_ids, output_hidden_states=True, use_cache=False)
        states = torch.cat([output.hidden_states[layer] for layer in self.heads.hidden_layers], dim=-1)
        return states.to(self.heads.dtype), output.last_hidden_state

    @torch.no_grad()
    def _target_probs(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """
        Return the target's probabilities `[n, own vocab]` among the heads' tokens from last states `[n, hidden]`; all 0
        where the text's own next token, in `tokens` (`[n]`), is none of these: such places are not learnt.
        """
        output: Any = self.target.get_output_embeddings()
        ids = self.heads.token_ids
        if ids is None:
            return output(hidden).float().softmax(dim=-1)
        if type(output) is nn.Linear:  # most of the cost of all tokens is saved
            logits = nn.functional.linear(hidden, output.weight[ids], None if output.bias is None else output.bias[ids])
        else:  # with adapters, for example
            logits = output(hidden).index_select(-1, ids)
        return logits.float().softmax(dim=-1) * torch.isin(tokens, ids)[:, None]

    def accuracy(self, texts: Sequence[Text], max_length: int, batch_size: int = 8) -> list[dict[int, float]]:
        """
        Return, for each step, the share of places where the right token is among the 1, 3 or 8 likeliest, given right
        tokens before it.
        """
        return accuracy(self._guesses, self.num_steps, texts, max_length, batch_size, self.target.device)

    @torch.no_grad()
    def _guesses(self, ids: torch.Tensor, labels: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        states, _ = self._target_states(ids)
        for step, (logits, where) in enumerate(self._drafts(ids, labels, states)):
            best, own = likeliest(logits), self.heads.token_ids
            yield best if own is None else own[best], ids[:, step + 2 :][where[:, :-1]]
