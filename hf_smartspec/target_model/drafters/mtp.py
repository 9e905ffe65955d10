"""transformers' MTP layers over ragged rows, draft trees included."""

import copy
from typing import Any

import torch
from transformers.modeling_layers import MtpModel

from ..attention.tree_attention import attention_configs, tree_attention_step
from ..cache.slot_cache import SlotCache
from ..compat import cache_name
from ..layout.skip_prefix import behind
from ..layout.step_layout import StepLayout
from .features import FeatureStep, Layers


class PackedMtp:
    """
    K MTP layers. With t the tokens of a text and f the target's last hidden states behind the final norm, layer k
    computes

        g[k, p] = layer_k(t[p], g[k - 1, p - 1]),    g[-1, p] = f[p]

    from which token p + 1 is predicted, with k as many tokens as p stands behind the first one of which f is unknown.
    Tokens further behind come from the last layer again and again, which then goes on from what it has left itself.

    All layers run at all tokens, since their keys and values are needed at those of the text. Features have D columns:
    the hidden size, for f or the newest g; where there are several layers, then what goes into each further one, and
    how many tokens the token stands behind the text.
    """

    def __init__(self, model: MtpModel):
        self.model: Any = model
        # Some change what they keep with the length of the text, on which the target relies.
        self._rotary: Any = copy.deepcopy(model.rotary_emb)
        self._configs = attention_configs(model.layers)
        self._cache_names = [cache_name(layer.forward) for layer in model.layers]

    @property
    def num_layers(self) -> int:
        return len(self.model.layers)

    @property
    def layers(self) -> Layers:
        return self._run_one if self.num_layers == 1 else self._run_several

    def _run_one(self, tokens: torch.Tensor, features: torch.Tensor, step: FeatureStep) -> torch.Tensor:
        return self._layer(0, self._embedded(tokens, features), features, step.layout, step.cache)

    def _run_several(self, tokens: torch.Tensor, features: torch.Tensor, step: FeatureStep) -> torch.Tensor:
        embedded, num = self._embedded(tokens, features), self.num_layers
        *inputs, depths = features.split([embedded.shape[2]] * num + [1], dim=1)
        outputs: list[torch.Tensor] = []
        for number, states in enumerate(inputs):
            if number:
                states = torch.where(depths == 0, self._before(number - 1, outputs[-1], step), states)
            outputs.append(self._layer(number, embedded, states, behind(step.layout, number), step.cache))
        newest = outputs[0]
        for number in range(1, num):
            newest = torch.where(depths >= number, outputs[number], newest)
        last = torch.where(depths >= num - 1, outputs[-1], outputs[-2])
        return torch.cat([newest, *outputs[:-2], last, depths + 1], dim=1)

    def _before(self, number: int, output: torch.Tensor, step: FeatureStep) -> torch.Tensor:
        """What layer `number` has left `[N, hidden_size]` at the token before each; kept beside keys and values."""
        kept, _ = step.cache.layer(self.num_layers + number).write(output[:, None], output[:, None, :0])
        return kept[(step.layout.lines - 1).clamp(min=0), 0]

    def _embedded(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """`[1, N, hidden_size]`"""
        embedded: torch.Tensor = self.model.embed_tokens(tokens[None]).to(features)
        return embedded

    def _layer(
        self, number: int, embedded: torch.Tensor, states: torch.Tensor, layout: StepLayout, cache: SlotCache
    ) -> torch.Tensor:
        """What one layer makes of embeddings `[1, N, hidden_size]` and states `[N, hidden_size]`."""
        positions = layout.positions + 1  # a row's first token is the second one of the text
        rotary = None
        if self._rotary is not None:
            kinds = getattr(self.model, "has_per_layer_rope", False)
            options = {"layer_type": self.model.config.layer_types[number]} if kinds else {}
            rotary = self._rotary(embedded, position_ids=positions, **options)
        with tree_attention_step(self._configs, layout):
            output = self.model.layers[number](
                embedded,
                states[None],
                position_embeddings=rotary,
                attention_mask=positions.new_zeros(1, 1, 1, 1),  # tree attention reads the layout instead
                position_ids=positions,
                **{self._cache_names[number]: cache},
            )
        if self.model.use_shared_post_norm:
            output = self.model.shared_post_norm(output)
        states = output[0]
        return states

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        """Features `[N, D]` of the target's hidden states `[N, hidden_size]` of the text."""
        num = self.num_layers - 1
        return torch.nn.functional.pad(states, (0, num * states.shape[1] + 1)) if num else states

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `[M, vocab_size]` of what the layers have left `[M, D]`."""
        size = self.model.config.hidden_size
        logits: torch.Tensor = self.model._project_to_logits(hidden[:, :size])
        return logits
