"""Layers of block drafters: Qwen3's, with a context from outside, and what kinds of drafters add to them."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import pad, softplus
from transformers.activations import ACT2FN

from .config import DFLASH2, SINK, BlockConfig
from .scores import Linear

Rotation = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, [..., 1, head_dim]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]  # see `forward`


class SlotConvolution(nn.Module):
    """
    DFlash2's convolutions before and after a part of a layer, over the slots of a block, causal: with T coefficients
    of each channel, base kernels plus what is projected from the part's input u, alike for `group` neighbours.
    """

    def __init__(self, hidden: int, size: int, group: int):
        super().__init__()
        self.group = group
        self.base_kernel = nn.Parameter(torch.empty(2, size, hidden))
        self.kernel_projection = Linear(hidden, 2 * size * hidden // group, bias=False)

    def kernels(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the kernels `[R, S, T, hidden_size]` before and after the part for inputs `[R, S, hidden_size]`."""
        _, size, channels = self.base_kernel.shape
        projected = self.kernel_projection(hidden).unflatten(-1, (2, size, channels // self.group))
        return (self.base_kernel + projected.repeat_interleave(self.group, dim=-1)).unbind(2)

    @staticmethod
    def convolve(hidden: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
        """Return Σ_t kernel_t ∘ hidden of the slot t earlier, `[R, S, hidden_size]`, with zeros before slot 0."""
        num = hidden.shape[1]
        shifted = [pad(hidden, (0, 0, back, 0))[:, :num] for back in range(kernel.shape[2])]
        return (kernel * torch.stack(shifted, dim=2)).sum(2)


class BlockLayer(nn.Module):
    """
    One layer. It reads the text before a block by keys and values of the target's hidden states, which a cache holds;
    those of the block's own slots are of no use after it.

    Attributes:
        causal (`bool`): Whether a slot sees only the slots up to itself.
        window (`int`, *optional*): The last positions that a query sees, its own included; None for all.
    """

    def __init__(self, config: BlockConfig, number: int):
        super().__init__()
        sizes, eps = config.sizes, config.sizes.rms_norm_eps
        hidden, inner, self.head_dim = sizes.hidden_size, sizes.intermediate_size, sizes.head_dim
        queries = sizes.num_attention_heads * self.head_dim
        keys = sizes.num_key_value_heads * self.head_dim
        self.causal, self.window = config.causal[number], config.windows[number]
        self.is_interleaved = config.is_interleaved
        self.activation = ACT2FN[sizes.hidden_act]
        self.norms_context, self.value_scale = config.norms_context, config.value_scale
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(hidden, eps), nn.RMSNorm(hidden, eps)
        parts = {
            "q_proj": Linear(hidden, queries, config.has_bias),
            "k_proj": Linear(hidden, keys, config.has_bias),
            "o_proj": Linear(queries, hidden, config.has_bias),
            "q_norm": nn.RMSNorm(self.head_dim, eps),
            "k_norm": nn.RMSNorm(self.head_dim, eps),
        }
        if config.has_values:
            parts["v_proj"] = Linear(hidden, keys, config.has_bias)
        if config.gate_size:
            parts["g_proj"] = Linear(hidden, config.gate_size, bias=False)
        self.layer_scalar = None
        if config.is_gemma:
            self.pre_feedforward_layernorm = nn.RMSNorm(hidden, eps)
            self.post_feedforward_layernorm = nn.RMSNorm(hidden, eps)
            parts["v_norm"] = nn.RMSNorm(self.head_dim, eps, elementwise_affine=False)
            self.layer_scalar = nn.Parameter(torch.ones(1))
        self.self_attn = nn.ModuleDict(parts)
        if config.has_sinks and config.has_sinks[number]:
            self.self_attn.register_parameter(SINK, nn.Parameter(torch.zeros(sizes.num_attention_heads)))
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": Linear(hidden, inner, bias=False),
                "up_proj": Linear(hidden, inner, bias=False),
                "down_proj": Linear(inner, hidden, bias=False),
            }
        )
        self.attention_conv = self.mlp_conv = None
        if config.kind == DFLASH2:
            shape = config.options["conv_kernel_size"], config.options["conv_group_size"]
            self.attention_conv, self.mlp_conv = SlotConvolution(hidden, *shape), SlotConvolution(hidden, *shape)

    def context(self, combined: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Return keys and values `[N, kv_heads, head_dim]` of committed positions.

        Args:
            combined (`torch.Tensor` of shape `[N, hidden_size]`): Results of `BlockDrafter.combine`.
            rotation (tuple): Result of `BlockDrafter.rotation` for their positions `[N]`.
        """
        if self.norms_context:
            combined = self.input_layernorm(combined)
        return self._keys_values(combined, rotation)

    def forward(self, hidden: torch.Tensor, rotation: Rotation, attend: Attend) -> torch.Tensor:
        """
        Return the layer's output for hidden states `[R, S, hidden_size]` of S slots.

        Args:
            rotation (tuple): Result of `BlockDrafter.rotation` for the positions `[R, S]` of the slots.
            attend (`Callable`): Attention over the context and the block, see `sees`: from queries `[R, S, heads,
                head_dim]`, the block's own keys and values `[R, S, kv_heads, head_dim]`, and the layer's sinks
                `[heads]` or None, to `[R, S, heads, head_dim]`. Scores are divided by the square root of `head_dim`.
                Sinks are logits that join each head's scores, and have no values.
        """
        attended = self._within(
            self.attention_conv, self.input_layernorm(hidden), lambda normed: self._attended(normed, rotation, attend)
        )
        if self.layer_scalar is None:
            hidden = hidden + attended
            return hidden + self._within(self.mlp_conv, self.post_attention_layernorm(hidden), self._mlp)
        hidden = hidden + self.post_attention_layernorm(attended)
        hidden = hidden + self.post_feedforward_layernorm(self._mlp(self.pre_feedforward_layernorm(hidden)))
        return hidden * self.layer_scalar

    @staticmethod
    def _within(
        conv: SlotConvolution | None, normed: torch.Tensor, part: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Return the output of a part of the layer, between its convolutions where there are any."""
        if conv is None:
            return part(normed)
        before, after = conv.kernels(normed)
        return conv.convolve(part(conv.convolve(normed, before)), after)

    def _attended(self, normed: torch.Tensor, rotation: Rotation, attend: Attend) -> torch.Tensor:
        queries = self._rotated(self.self_attn["q_norm"](self._heads("q_proj", normed)), rotation)
        if self.layer_scalar is not None:
            queries = queries * self.head_dim**0.5  # scores have no scale
        sinks = getattr(self.self_attn, SINK, None)
        output = attend(queries, *self._keys_values(normed, rotation), sinks)
        if "g_proj" in self.self_attn:
            gate = softplus(self.self_attn["g_proj"](normed).float()).to(output)
            output = output * gate.unflatten(-1, (output.shape[2], -1))
        mapped: torch.Tensor = self.self_attn["o_proj"](output.flatten(-2))
        return mapped

    def _keys_values(self, hidden: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        keys = self._heads("k_proj", hidden)
        values = self._heads("v_proj", hidden) if "v_proj" in self.self_attn else keys
        if "v_norm" in self.self_attn:
            values = self.self_attn["v_norm"](values)
        if self.value_scale != 1.0:
            values = values * self.value_scale
        return self._rotated(self.self_attn["k_norm"](keys), rotation), values

    def _mlp(self, normed: torch.Tensor) -> torch.Tensor:
        gate, up = self.mlp["gate_proj"](normed), self.mlp["up_proj"](normed)
        output: torch.Tensor = self.mlp["down_proj"](self.activation(gate) * up)
        return output

    def sees(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """
        Return which positions `[..., T]` queries at positions `[..., S]` see, `[..., S, T]`, given that the keys are
        those of the text before the block and of the block's slots.
        """
        after = keys[..., None, :] - queries[..., :, None]
        seen = after <= 0 if self.causal else torch.ones_like(after, dtype=torch.bool)
        return seen if self.window is None else seen & (after > -self.window)

    def _heads(self, name: str, hidden: torch.Tensor) -> torch.Tensor:
        heads: torch.Tensor = self.self_attn[name](hidden)
        return heads.unflatten(-1, (-1, self.head_dim))

    def _rotated(self, heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        cos, sin = rotation
        if (num := cos.shape[-1]) < self.head_dim:
            turned, kept = heads.split([num, self.head_dim - num], dim=-1)
            return torch.cat([self._turned(turned, cos, sin), kept], dim=-1)
        return self._turned(heads, cos, sin)

    def _turned(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        if self.is_interleaved:
            half = cos.shape[-1] // 2
            pairs = torch.stack([-heads[..., 1::2], heads[..., ::2]], dim=-1).flatten(-2)
            return heads * cos[..., :half].repeat_interleave(2, -1) + pairs * sin[..., :half].repeat_interleave(2, -1)
        first, second = heads.chunk(2, dim=-1)
        return heads * cos + torch.cat([-second, first], dim=-1) * sin
