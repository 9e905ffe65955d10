"""A target that takes no time and picks the tokens of known texts, and the texts and trees of a step's host time."""

import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_smartspec.candidates.base import TreeCandidateGenerator
from hf_smartspec.drafts.tree import DraftTree
from hf_smartspec.goodput import CostModel
from hf_smartspec.simulator.clock import EventClock
from hf_smartspec.simulator.forward import ForwardSize
from hf_smartspec.target_model.cache.slot_layer import SlotLayer
from hf_smartspec.target_model.forward.packed import PackedForward
from hf_smartspec.target_model.layout.rows import CacheRow, RowInput
from hf_smartspec.target_model.layout.step_layout import StepLayout

VOCAB_SIZE = 32_000
CALL = 2**14  # columns that a further call of attention costs: those of 8 heads of 128 on a GPU
_DEPTH, _CHANCE = 8, 0.7  # of drawn trees: levels, and how likely each one's first node is right


def llama_config(
    hidden_size: int, num_layers: int, num_heads: int, vocab_size: int = VOCAB_SIZE, **others: Any
) -> LlamaConfig:
    """Return the config of a Llama with tied embeddings and the usual special tokens."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **others,
    )


def stub_config() -> LlamaConfig:
    """Return the config of a head so small that `call_columns` is `CALL`."""
    return llama_config(4, 1, 1, intermediate_size=8)


class StubForward(PackedForward):
    """
    A `PackedForward` whose written-out decoder computes nothing: it lays out every step as usual, and picks the tokens
    of known texts. The time of these picks is kept in `seconds`, since it stands for the device's work.

    Args:
        num_rows (`int`): Rows.
        cost (`CostModel`): What a forward takes ...
        clock (`EventClock`): ... of this clock, by which the loop measures itself.
        look (`Callable`): Called before every forward, as is what looks for a written-out decoder, with its `may_wait`.
    """

    def __init__(self, num_rows: int, cost: CostModel, clock: EventClock, look: Callable[[bool], None]):
        super().__init__(LlamaForCausalLM(stub_config()).eval(), num_rows, 4096, choose=self._decoder)
        self.cost, self.clock, self.seconds, self._look = cost, clock, 0.0, look
        self._logits = torch.zeros(1, VOCAB_SIZE)
        self._texts: dict[CacheRow, list[int]] = {}
        self._picks: list[int] = []
        layer = SlotLayer(self.cache)  # of one number per token, so that there is something to commit
        layer.lazy_initialization(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1))
        self.cache.layers.append(layer)

    def set_text(self, row: CacheRow, text: np.ndarray) -> None:
        """Set the row's text, prompt included, int64 `[length]`."""
        self._texts[row] = text.tolist()

    def text(self, row: CacheRow) -> list[int]:
        return self._texts[row]

    def forward(self, inputs: Sequence[RowInput]) -> tuple[torch.Tensor, list[int]]:
        start = time.perf_counter()
        self.clock.advance(float(self.cost.seconds(*ForwardSize.of(inputs, CALL))))
        self.seconds += time.perf_counter() - start
        logits, offsets = super().forward(inputs)
        start = time.perf_counter()
        self._picks = [0] * len(logits)
        for item, offset in zip(inputs, offsets):
            line = self._texts[item.row][item.row.length :]
            depths = [0, *item.tree.depths.tolist()] if len(item.tree) else [0]
            self._picks[offset : offset + len(depths)] = [line[depth] for depth in depths]
        self.seconds += time.perf_counter() - start
        return logits, offsets

    def _decoder(self, may_wait: bool) -> Any:
        self._look(may_wait)
        return self._decode

    def _decode(self, layout: StepLayout, *_: Any) -> torch.Tensor:
        """Return one line of zeros, as often as asked for."""
        return self._logits.expand(layout.tokens.shape[1] if layout.kept is None else len(layout.kept), -1)

    def argmax(self, logits: torch.Tensor) -> list[int]:
        return self._picks

    def top(self, logits: torch.Tensor, count: int, num_lines: int, with_argmax: bool) -> None:
        """Do nothing: the tokens are not those of the logits."""


class DrawnTrees(TreeCandidateGenerator):
    """
    Trees of `num_nodes` nodes, some of which are right. The time of drawing them is no part of a step's `seconds`,
    which are those of the machinery.

    Args:
        texts (dict): Each request's text after its prompt, int64 `[length]`.
        num_nodes (`int`): Nodes of every tree.
    """

    def __init__(self, texts: dict[Hashable, np.ndarray], num_nodes: int, seed: int = 0):
        self.default_num_nodes, self.seconds = num_nodes, 0.0
        self._texts, self._num_seen = texts, dict.fromkeys(texts, 0)
        self._rng = np.random.default_rng(seed)
        # Levels of equal width, whose nodes all hang on the first one of the level above.
        self._width = -(-num_nodes // _DEPTH)
        self._levels, self._ranks = np.divmod(np.arange(num_nodes), self._width)
        self._parents = np.where(self._levels == 0, -1, (self._levels - 1) * self._width)
        self._chances = np.append(_CHANCE, np.full(self._width - 1, (1 - _CHANCE) / self._width))
        self._probs = self._chances[self._ranks].astype(np.float32)

    def start(self, request_id: Hashable, prompt: np.ndarray) -> None:
        pass

    def propose(self, request_ids: Sequence[Hashable], max_nodes: Sequence[int]) -> list[DraftTree]:
        start = time.perf_counter()
        trees = [self._tree(name).most_likely(limit) for name, limit in zip(request_ids, max_nodes)]
        self.seconds += time.perf_counter() - start
        return trees

    def _tree(self, request_id: Hashable) -> DraftTree:
        truth = self._texts[request_id][self._num_seen[request_id] + self._levels]
        right = np.searchsorted(self._chances.cumsum(), self._rng.random(_DEPTH))  # which of each level's nodes, if any
        wrong = (truth + 1 + self._ranks) % VOCAB_SIZE
        tokens = np.where(self._ranks == right[self._levels], truth, wrong)
        return DraftTree.of(tokens, self._parents.copy(), self._probs.copy())

    def observe(self, request_id: Hashable, tokens: np.ndarray) -> None:
        self._num_seen[request_id] += len(tokens)

    def stop(self, request_id: Hashable) -> None:
        pass


def repetitive_text(length: int, rng: np.random.Generator) -> np.ndarray:
    """Return a text of 40 phrases of 4 to 24 tokens that come again and again, int64 `[length]`."""
    phrases = [rng.integers(3, VOCAB_SIZE, rng.integers(4, 24)) for _ in range(40)]
    order = rng.integers(0, len(phrases), -(-length // 4))
    return np.concatenate([phrases[index] for index in order])[:length]
