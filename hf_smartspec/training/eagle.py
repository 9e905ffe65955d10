"""Training of EAGLE-3's heads on their own features ("training-time test", arXiv 2503.01840, section 3.2)."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

from ..candidates.heads.eagle.config import default_layers, window_of
from ..candidates.heads.eagle.files import numbered
from ..candidates.heads.eagle.heads import EagleHeads
from .accuracy import accuracy, likeliest
from .target import (
    CALM,
    NOISE,
    check_layers,
    layer_config,
    layer_weights,
    norm_weight,
    output_weight,
    target_probs,
    target_states,
)
from .texts import IGNORED, Text, chosen, send

_DECAY = 0.8  # of the weight of each further step in the loss


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
    output = output_weight(target)
    config, layers = layer_config(target, neurons), default_layers(target)
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
    weight = output.float().cpu()
    _copy_last_layer(tensors, target)
    tensors["lm_head.weight"] = weight.clone() if token_ids is None else weight[token_ids]
    if token_ids is not None:
        tensors["d2t"] = token_ids - torch.arange(len(token_ids))
    return EagleHeads(config, tensors, layers, target).to(output.device)


def _copy_last_layer(tensors: dict[str, torch.Tensor], target: PreTrainedModel) -> None:
    """
    Replace random weights by those of the target's final norm and last layer, as far as their shapes are the same, if
    that is a Llama's: features begin as the last hidden state that the heads read, which such a layer continues.
    """
    weights, size = layer_weights(target, -1), len(tensors["norm.weight"])
    if not weights:
        return
    tensors["norm.weight"] = CALM * norm_weight(target)
    weights["hidden_norm"] = weights.pop("input_layernorm")
    for name, found in weights.items():
        wanted = tensors[f"{name}.weight"]
        own = wanted[:, size:] if name in ("q_proj", "k_proj", "v_proj") else wanted  # features, after embeddings
        if found.shape == own.shape:
            own.copy_(found)
    fc = tensors["fc.weight"].mul_(NOISE)
    fc[:, -size:] += torch.eye(size)


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

    Raises:
        ValueError: for heads that draft all depths in one forward (P-EAGLE), which are trained otherwise.
    """

    def __init__(self, heads: EagleHeads, num_steps: int):
        if heads.mask_hidden is not None:
            raise ValueError("Heads that draft all depths in one forward (P-EAGLE) cannot be trained here.")
        self.heads, self.num_steps, self._rotary = heads, num_steps, heads.rotary()

    def __call__(
        self, input_ids: torch.Tensor, labels: torch.Tensor, states: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """
        Draft `num_steps` tokens after each token of a batch.

        Args:
            input_ids (`torch.Tensor` of shape `[rows, length]`): As `texts.collate` makes them.
            labels (`torch.Tensor` of shape `[rows, length]`): The same, on the host.
            states (`torch.Tensor` of shape `[rows, length, layers * hidden]`): The target's hidden states.

        Yields:
            For every step, the logits `[n, own vocab]` of the positions that are trained on, and a mask of these
            positions, bool `[rows, length - step - 1]`, on the host. In step k, position i reads token i + k + 1, and
            the features that the step before has left at position i.
        """
        heads, length = self.heads, input_ids.shape[1]
        features, first = heads.combine(states), 0
        begin = max(int((labels != IGNORED).any(0).int().argmax()) - 2, 0)  # first position that is trained on
        memory: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(heads.num_layers)]
        for step in range(min(self.num_steps, length - 2)):
            end = length - step - 1
            positions = torch.arange(first + step, end + step, device=input_ids.device)[None]
            x, residual = heads.inputs(heads.embed(input_ids[:, first + step + 1 :]), features[:, : end - first])
            for layer, held in enumerate(memory):
                if layer:
                    x = heads.part("input_layernorm", layer)(residual)
                residual = heads.layer_output(residual + self._attend(layer, x, positions, first, held), layer)
            features = residual
            where = torch.zeros(input_ids.shape[0], end, dtype=torch.bool)
            # Train on drafts that lie in the response as a whole.
            where[:, :-1] = (labels[:, 2 : end + 1] != IGNORED) & (labels[:, step + 2 :] != IGNORED)
            yield heads.logits(chosen(features, where[:, first:])), where
            if step == 0:  # further steps run at trained positions only
                first, features = begin, features[:, begin:]

    def _attend(
        self,
        layer: int,
        x: torch.Tensor,
        positions: torch.Tensor,
        first: int,
        memory: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        """
        Return a layer's attention outputs `[rows, n, hidden]` of the n positions from `first` on. A position attends
        to the text so far by keys of the first step, and to keys of later steps at the same position only, within the
        layer's window.
        """
        heads, window, step = self.heads, window_of(self.heads.config, layer), len(memory)
        query, key, value = (
            heads.part(name, layer)(x).unflatten(2, (-1, heads.config.head_dim)).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        if numbered("q_norm", layer) in heads.parts:
            query, key = heads.part("q_norm", layer)(query), heads.part("k_norm", layer)(key)
        rotated = apply_rotary_pos_emb(query, key, *self._rotary(x, positions))
        query, key = (item.to(value.dtype) for item in rotated)  # norms are in float32 under autocast
        groups, num = query.shape[1] // key.shape[1], x.shape[1]
        memory.append((repeat_kv(key, groups), repeat_kv(value, groups)))
        seen = memory[1:] if window is None else memory[1:][-window:]
        (keys, values), own = memory[0], [(keys[:, :, :num], values[:, :, :num]) for keys, values in seen]
        if not own and window is None:
            output = scaled_dot_product_attention(query, keys, values, is_causal=True)
            return heads.part("o_proj", layer)(output.transpose(1, 2).flatten(2))
        total = first + num
        query = query * query.shape[-1] ** -0.5
        scores = query @ keys[:, :, :total].transpose(2, 3)
        ones = torch.ones(num, total, dtype=torch.bool, device=x.device)
        is_hidden = ones.triu(first + 1)
        if window is not None:  # row i is the query of position `first + i + step`
            is_hidden |= ones.tril(first + step - window)
        scores.masked_fill_(is_hidden, -torch.inf)
        scores = torch.cat([scores, *[(query * keys).sum(-1, keepdim=True) for keys, _ in own]], dim=-1)
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(values.dtype)
        output = weights[..., :total] @ values[:, :, :total]
        for index, (_, values) in enumerate(own):
            output = output + weights[..., total + index, None] * values
        return heads.part("o_proj", layer)(output.transpose(1, 2).flatten(2))


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
        check_layers(heads.hidden_layers, target)
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
        # Places are picked on the host, with one wait for a GPU before its work begins, and none after that.
        labels = labels.cpu()
        device = input_ids.device.type
        # Heads draft in a half-precision target's dtype, and are trained in it: several times as fast.
        with torch.autocast(device, self.target.dtype, enabled=self.target.dtype.itemsize == 2):
            states, hidden = target_states(self.target, self.heads.hidden_layers, input_ids)
            losses = [next(self.parts.parameters()).sum() * 0.0]  # a loss with gradients where texts are too short
            is_learnt = labels[:, 1:] != IGNORED
            # Once for all steps.
            own = self.heads.token_ids
            tokens = chosen(input_ids[:, 1:], is_learnt)
            probs = target_probs(self.target, own, chosen(hidden[:, :-1], is_learnt), tokens)
            places = is_learnt.flatten().cumsum(0).view_as(is_learnt) - 1
            for step, (logits, where) in enumerate(self._drafts(input_ids, labels, states)):
                if len(logits):
                    wanted = probs.index_select(0, send(places[:, step + 1 :][where[:, :-1]], probs.device))
                    losses.append(-(_DECAY**step) * (wanted * logits.float().log_softmax(dim=-1)).sum(-1).mean())
        return {"loss": torch.stack(losses).sum()}

    def accuracy(self, texts: Sequence[Text], max_length: int, batch_size: int = 8) -> list[dict[int, float]]:
        """
        Return, for each step, the share of places where the right token is among the 1, 3 or 8 likeliest, given right
        tokens before it.
        """
        return accuracy(self._guesses, self.num_steps, texts, max_length, batch_size, self.target.device)

    @torch.no_grad()
    def _guesses(self, ids: torch.Tensor, labels: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        labels = labels.cpu()
        states, _ = target_states(self.target, self.heads.hidden_layers, ids)
        for step, (logits, where) in enumerate(self._drafts(ids, labels, states)):
            best, own = likeliest(logits), self.heads.token_ids
            yield best if own is None else own[best], chosen(ids[:, step + 2 :], where[:, :-1])
