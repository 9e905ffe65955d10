"""
Block drafters (DFlash, arXiv 2602.06036, and what followed it): layers over an anchor, mask tokens, and the target's
hidden states of the text before.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import embedding
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ....target_model.written.parts import written_map
from ..learned import LearnedDrafter
from .config import DFLASH2, DOMINO, DSPARK, XPRESS, BlockConfig
from .files import check_tensors, read, write
from .layers import BlockLayer, Rotation
from .scores import ConfidenceHead, Lattice, Linear, MarkovHead, RefinerHead, Selector, conditioned, independent, scaled


class BlockDrafter(LearnedDrafter):
    """
    A block drafter. Slot 0 of a block holds the newest token, the *anchor*, which the target has not run; all others
    hold the mask token. With f_p the target's hidden states of a committed position p, side by side,

        c_p = norm(fc f_p)        keys and values of all layers at p        (`combine`, `BlockLayer.context`)
        x   = layers(embeddings of the slots)                               (`embed`, `BlockLayer.forward`)
        candidates and their probabilities, from norm(x)                    (`norm`, `lattice`)

    Names of parameters are those of published files.

    Args:
        spec (`BlockConfig`): What the files say.
        tensors (mapping of `str` to `torch.Tensor`, *optional*): Weights by name, and `d2t` where outputs are not all
            tokens; by default, weights to begin a training with.
        target (`PreTrainedModel`): Lends its embeddings and its head, where there are none of the drafter's own.

    Attributes:
        config (`LlamaConfig`): Sizes of its own layers.
        hidden_layers, block_size, first_slot, num_depths: See `BlockConfig`.
        target_size, vocab_size (`int`): Size of the target's hidden states and of its vocabulary.
        layers (`nn.ModuleList` of `BlockLayer`): Its layers.

    Raises:
        ValueError: for tensors that are missing, unknown or of a wrong shape, or do not fit the target.
    """

    token_ids: torch.Tensor | None

    def __init__(self, spec: BlockConfig, tensors: Mapping[str, torch.Tensor] | None, target: PreTrainedModel):
        super().__init__()
        self.spec, self.config, self.label, self.vocab_size = spec, spec.sizes, spec.kind, spec.sizes.vocab_size
        self.hidden_layers, self.target_size, self.block_size = spec.hidden_layers, spec.target_hidden, spec.block_size
        self.first_slot, self.num_depths = spec.first_slot, spec.num_depths
        # The target's own are no part of this module: they move, and are saved, with the target.
        self._target_parts = target.get_input_embeddings(), target.get_output_embeddings()
        self._embedding_scale = float(getattr(target.get_decoder(), "embedding_multiplier", 1.0))
        self._rotary: dict[torch.device, LlamaRotaryEmbedding] = {}  # no module, whose frequencies would lose digits
        ids = None if tensors is None else tensors.get("d2t")
        with torch.device("cpu" if tensors is None else "meta"):
            self._build(spec)
        if tensors is not None:
            weights = {name: item for name, item in tensors.items() if name != "d2t"}
            check_tensors(weights, self.state_dict())
            self.load_state_dict(weights, assign=True)
        self.register_buffer(
            "token_ids", None if ids is None else ids.long() + torch.arange(len(ids)), persistent=False
        )
        self.check_fit(target)

    def _build(self, spec: BlockConfig) -> None:
        sizes, options, rank = spec.sizes, spec.options, spec.options.get("markov_rank", 0)
        hidden, vocab = sizes.hidden_size, sizes.vocab_size
        each = hidden if spec.has_adapter else spec.target_hidden
        self.fc = Linear(len(spec.hidden_layers) * each, hidden, bias=False)
        adapter = {"proj": Linear(spec.target_hidden, hidden, bias=False)} if spec.has_adapter else {}
        self.hidden_dim_adapter = nn.ModuleDict(adapter)
        norms = len(spec.hidden_layers) if spec.norms_states else 0
        self.aux_hidden_norms = nn.ModuleList(nn.RMSNorm(spec.target_hidden, sizes.rms_norm_eps) for _ in range(norms))
        self.hidden_norm, self.norm = (nn.RMSNorm(hidden, sizes.rms_norm_eps) for _ in range(2))
        self.layers = nn.ModuleList(BlockLayer(spec, number) for number in range(sizes.num_hidden_layers))
        self.embed_tokens = nn.Embedding(vocab, hidden) if spec.has_embedding else None
        self.lm_head = Linear(hidden, spec.draft_vocab, bias=False) if spec.has_head else None
        self.mask_embedding = nn.Parameter(torch.zeros(hidden)) if spec.has_mask_embedding else None
        self.candidate_selector = self.markov_head = self.confidence_head = None
        if spec.kind == DFLASH2:
            self.candidate_selector = Selector(vocab, hidden, options["selector_rank"], options["selector_top_k"])
        elif spec.kind == DSPARK:
            self.markov_head = MarkovHead(options["markov_head_type"], vocab, spec.draft_vocab, hidden, rank)
        elif spec.kind == XPRESS:
            self.refiner_head = RefinerHead(options, vocab, spec.draft_vocab, hidden, spec.block_size)
        elif spec.kind == DOMINO:
            state, inner = options["gru_hidden_dim"], options["emb_dim"]
            self.prefix_gru = nn.GRU(hidden, state, bias=False)
            maps = Linear(hidden + state, inner, bias=False), Linear(inner, spec.draft_vocab, bias=False)
            self.embed_proj = nn.Sequential(maps[0], nn.SiLU(), maps[1])
        if options.get("enable_confidence_head"):
            reads = rank if options["confidence_head_with_markov"] else 0
            self.confidence_head = ConfidenceHead(hidden, reads, options["confidence_bias"])

    @classmethod
    def from_pretrained(cls, name: str | Path, target: PreTrainedModel) -> "BlockDrafter":
        """
        Read the published files of a folder or hub id: the authors', or those of speculators.

        Raises:
            ValueError: if the files hold no such drafter, or one for another target.
        """
        config, tensors = read(name, target)
        try:
            drafter = cls(config, tensors, target)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        return drafter._placed(name, target).requires_grad_(False)

    def save_pretrained(self, folder: str | Path, **config: Any) -> None:
        """Write `model.safetensors` and `config.json`, with further entries, as the authors' own."""
        tensors, ids = self.state_dict(), self.token_ids
        if ids is not None:
            tensors["d2t"] = ids - torch.arange(len(ids), device=ids.device)
        write(folder, self.spec, tensors, config)

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    def check_fit(self, target: PreTrainedModel) -> None:
        sizes = target.config.get_text_config(decoder=True)
        if (sizes.vocab_size, sizes.hidden_size) != (self.vocab_size, self.spec.target_hidden):
            raise ValueError(
                f"a block drafter for a target of hidden size {self.spec.target_hidden} and {self.vocab_size} tokens "
                f"does not fit one of hidden size {sizes.hidden_size} and {sizes.vocab_size} tokens"
            )
        parts: tuple[Any, Any] = self._target_parts
        for own, lent in zip((self.embed_tokens, self.lm_head), parts):
            if own is None and lent.weight.shape[1] != self.config.hidden_size:
                raise ValueError(
                    f"a block drafter of hidden size {self.config.hidden_size} cannot use the target's embeddings and "
                    f"head, of size {lent.weight.shape[1]}"
                )
        num_rows = (self.embed_tokens or parts[0]).weight.shape[0]
        if self.mask_embedding is None and self.spec.mask_token >= num_rows:
            raise ValueError(f"`mask_token_id` {self.spec.mask_token} is none of the {num_rows} embeddings")

    # What the drafter computes

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        """
        Return what keys and values of the context are made of, `[N, hidden_size]`, from the target's hidden states
        `[N, layers * target's hidden_size]`.
        """
        if self.spec.norms_states:
            parts = states.unflatten(-1, (-1, self.target_size)).unbind(-2)
            states = torch.cat([norm(part) for norm, part in zip(self.aux_hidden_norms, parts)], dim=-1)
        if self.spec.has_adapter:
            states = self.hidden_dim_adapter["proj"](states.unflatten(-1, (-1, self.spec.target_hidden))).flatten(-2)
        combined: torch.Tensor = self.hidden_norm(self.fc(states))
        return combined

    def rotation(self, positions: torch.Tensor) -> Rotation:
        """Return cosines and sines `[..., 1, turned numbers of a head]` of positions `[...]` in the text."""
        device = positions.device
        if device not in self._rotary:
            self._rotary[device] = LlamaRotaryEmbedding(self.spec.rotary).to(device)
        like = torch.empty(0, dtype=self.dtype, device=device)
        cos, sin = self._rotary[device](like, positions.reshape(1, -1))
        shape = *positions.shape, 1, cos.shape[-1]
        return cos.view(shape), sin.view(shape)

    def embed(self, anchors: torch.Tensor, num_slots: int) -> torch.Tensor:
        """Return the embeddings `[R, num_slots, hidden_size]` of anchors `[R]` and of the mask tokens after them."""
        tokens = torch.cat([anchors, anchors.new_full((1,), self.spec.mask_token)])
        if self.mask_embedding is None:
            embedded = self._embedded(tokens)
        else:
            embedded = torch.cat([self._embedded(anchors), self.mask_embedding[None]])
        embedded = embedded * self.spec.embedding_scale
        masks = embedded[-1].expand(len(anchors), num_slots - 1, -1)
        return torch.cat([embedded[:-1, None], masks], dim=1)

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return embeddings `[N, hidden_size]` as the target's first layer reads them, without any norm (Muse)."""
        lent: Any = self._target_parts[0]
        if self.embed_tokens is not None:
            embedded = self.embed_tokens(tokens) * getattr(lent, "embed_scale", 1.0)
        elif hasattr(lent, "embed_norm"):
            embedded = embedding(tokens.to(lent.weight.device), lent.weight)
        else:
            embedded = lent(tokens.to(lent.weight.device))
        result: torch.Tensor = embedded.to(device=self.device, dtype=self.dtype) * self._embedding_scale
        return result

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits `[..., own vocab]`, float32, of hidden states `[..., hidden_size]` after the final norm."""
        head = written_map([self._target_parts[1] if self.lm_head is None else self.lm_head])
        logits = head(hidden.flatten(0, -2)).unflatten(0, hidden.shape[:-1]).float() * self.spec.logits_scale
        cap = self.spec.softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def lattice(
        self,
        hidden: torch.Tensor,
        anchors: torch.Tensor,
        width: int,
        adjust: Callable[[torch.Tensor], torch.Tensor] | None = None,
        before: torch.Tensor | None = None,
        temperatures: torch.Tensor | None = None,
    ) -> Lattice:
        """
        Return the candidates of each depth and their probabilities.

        Args:
            hidden (`torch.Tensor` of shape `[R, S, hidden_size]`): Outputs of S slots after the final norm; a block may
                be shorter than `block_size`.
            anchors (`torch.Tensor` of shape `[R]`): The tokens in slot 0.
            width (`int`): Largest number of candidates at a depth, unless the drafter has been trained for another one
                (DFlash2).
            adjust (`Callable`, *optional*): Changes logits `[R, L, own vocab]` before candidates are chosen by them.
            before (`torch.Tensor` of shape `[R]`, *optional*): The tokens before the anchors, which xPress reads; by
                default, the anchors.
            temperatures (`torch.Tensor` of shape `[R]`, *optional*): What `adjust` divides logits by, and what is added
                to them afterwards is divided by, too.
        """
        slots = hidden[:, self.first_slot : self.first_slot + self.num_depths]
        logits, to_target, states = self.logits(slots), self._target_tokens, None
        if adjust is not None:
            logits = adjust(logits)
        if self.candidate_selector is not None:
            return self.candidate_selector.lattice(logits, slots, anchors, temperatures)
        if self.spec.kind == DOMINO:
            step, output = scaled(self._domino_step, temperatures), cast(nn.Linear, self.embed_proj[2])
            return conditioned(logits, slots, anchors, width, step, None, output, to_target)
        if self.markov_head is not None:
            step = scaled(self.markov_head.step, temperatures)
            if self.first_slot:  # slot 0 has the anchor before it, too
                _, states = step(anchors[:, None], None, hidden[:, 0])
            lattice = conditioned(logits, slots, anchors, width, step, states, self.markov_head.markov_w2, to_target)
        else:
            if self.spec.kind == XPRESS:
                ahead = [anchors if before is None else before, anchors][1 - self.first_slot :]
                logits = self.refiner_head(logits, hidden, torch.stack(ahead, dim=1), to_target, temperatures)
            lattice = independent(logits, width)
            lattice = lattice._replace(tokens=to_target(lattice.tokens))
        if self.confidence_head is None:
            return lattice
        return lattice._replace(confidence=self._confidence(slots, anchors, lattice.tokens))

    def _domino_step(
        self, tokens: torch.Tensor, states: torch.Tensor | None, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return, as `Step`, what Domino adds after all tokens but the anchor, and the states of its GRU."""
        gru: Any = self.prefix_gru
        embedded = self._embedded(tokens.flatten())
        before = embedded.new_zeros(len(embedded), gru.hidden_size) if states is None else states.flatten(0, 1)
        after = torch.gru_cell(embedded, before, gru.weight_ih_l0, gru.weight_hh_l0).unflatten(0, tokens.shape)
        both = torch.cat([hidden[:, None].expand(-1, tokens.shape[1], -1), after], dim=-1)
        vectors = self.embed_proj[:2](both)
        return torch.zeros_like(vectors) if states is None else vectors, after

    def _confidence(self, slots: torch.Tensor, anchors: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """See `Lattice`."""
        before = None
        if self.markov_head is not None and self.spec.options["confidence_head_with_markov"]:
            ahead = anchors[:, None, None].expand(-1, 1, tokens.shape[2])
            before = self.markov_head.markov_w1(torch.cat([ahead, tokens[:, :-1]], dim=1))
        confidence: torch.Tensor = self.confidence_head(slots, before)  # type: ignore[misc]
        return confidence.expand(-1, -1, tokens.shape[2])

    def _target_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens if self.token_ids is None else self.token_ids[tokens]
