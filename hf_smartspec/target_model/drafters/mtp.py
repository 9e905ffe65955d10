"""transformers' MTP layers over ragged rows, draft trees included."""

import copy
from typing import Any

import torch
from transformers.modeling_layers import MtpModel

from ..attention.tree_attention import attention_configs, tree_attention_step
from ..cache.slot_cache import SlotCache
from ..compat import cache_name
from ..layout.skip_prefix import skip_prefix
from ..layout.step_layout import StepLayout
from ..written.inputs import Features
from .features import FeatureStep


class PackedMtp:
    """
    K MTP layers. With t the tokens of a text and f the target's last hidden states after the final norm, layer k
    computes

        g[k, p] = layer_k(t[p], g[k - 1, p - 1]),    g[-1, p] = f[p]

    which predicts token p + 1; k is the distance of p from the first token whose f is unknown. Tokens at larger
    distances are predicted by the last layer, which then continues from its own outputs.

    All layers run at all tokens, since their keys and values are needed at those of the text. Features have D columns:
    the hidden size, for f or the newest g; where there are several layers, then the input of each further layer, and
    the token's distance from the text.
    """

    def __init__(self, model: MtpModel):
        self.model: Any = model
        # A copy, since some adapt frequencies to the text's length, and the target relies on those of its own module.
        self._rotary: Any = copy.deepcopy(model.rotary_emb)
        self._configs = attention_configs(model.layers)
        self._cache_names = [cache_name(layer.forward) for layer in model.layers]

    @property
    def num_layers(self) -> int:
        return len(self.model.layers)

    def run(self, features: Features, step: FeatureStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layers, as `FeatureLayers.layers`."""
        values = self._combine(features.values) if features.are_states else features.values
        run = self._run_one if self.num_layers == 1 else self._run_several
        hidden = step.kept(run(step.layout.tokens[0], values, step))
        return hidden, self.logits(hidden)

    def _run_one(self, tokens: torch.Tensor, features: torch.Tensor, step: FeatureStep) -> torch.Tensor:
        return self._layer(0, self._embedded(tokens, features), features, step.layout, step.cache)

    def _run_several(self, tokens: torch.Tensor, features: torch.Tensor, step: FeatureStep) -> torch.Tensor:
        embedded, num = self._embedded(tokens, features), self.num_layers
        *inputs, depths = features.split([embedded.shape[2]] * num + [1], dim=1)
        outputs: list[torch.Tensor] = []
        for number, states in enumerate(inputs):
            if number:
                states = torch.where(depths == 0, self._before(number - 1, outputs[-1], step), states)
            outputs.append(self._layer(number, embedded, states, skip_prefix(step.layout, number), step.cache))
        newest = outputs[0]
        for number in range(1, num):
            newest = torch.where(depths >= number, outputs[number], newest)
        last = torch.where(depths >= num - 1, outputs[-1], outputs[-2])
        return torch.cat([newest, *outputs[:-2], last, depths + 1], dim=1)

    def _before(self, number: int, output: torch.Tensor, step: FeatureStep) -> torch.Tensor:
        """
        Return the output `[N, hidden_size]` of layer `number` at the token before each; it is kept beside keys and
        values.
        """
        kept, _ = step.cache.layer(self.num_layers + number).write(output[:, None], output[:, None, :0])
        return kept[(step.layout.lines - 1).clamp(min=0), 0]

    def _embedded(self, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Return embeddings `[1, N, hidden_size]`."""
        embedded: torch.Tensor = self.model.embed_tokens(tokens[None]).to(features)
        return embedded

    def _layer(
        self, number: int, embedded: torch.Tensor, states: torch.Tensor, layout: StepLayout, cache: SlotCache
    ) -> torch.Tensor:
        """
        Return the output of one layer, `[N, hidden_size]`, for embeddings `[1, N, hidden_size]` and states `[N,
        hidden_size]`.
        """
        positions = layout.positions + 1  # the first token of a row is the second of its text
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

    def _combine(self, states: torch.Tensor) -> torch.Tensor:
        """Return features `[N, D]` of the target's hidden states `[N, hidden_size]` of the text."""
        num = self.num_layers - 1
        return torch.nn.functional.pad(states, (0, num * states.shape[1] + 1)) if num else states

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits `[M, vocab_size]` of the layers' outputs `[M, D]`."""
        size = self.model.config.hidden_size
        logits: torch.Tensor = self.model._project_to_logits(hidden[:, :size])
        return logits
