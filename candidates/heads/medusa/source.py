"""The source that drafts with Medusa heads."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ....device import fetch_together
from ....drafts.price import LevelPrice
from ....drafts.tree import DraftTree
from ....goodput.estimates.calibrator import Calibrator
from ....validate import check_positive
from ...base import TreeCandidateGenerator
from ...committed import HIDDEN_STATES, LAST, Committed
from ...request import SourceRequest
from ..trees import FixedTree, best_trees, full_tree
from .heads import MedusaHeads

_NUM_NODES, _WIDTH = 32, 8  # of a tree at most; candidates of each head, unless a fixed tree has more
_NUM_SCORES = 64  # of a table of calibrated probabilities
_MOST_PENDING = 256  # observations that wait for the table to be made anew


@dataclass(eq=False)
class _State:
    """
    State of one request: the hidden state `[hidden]` that its newest token was picked by, and, until its next tokens
    are committed, the candidates after that token and their raw probabilities, `[K, w]` each.
    """

    hidden: torch.Tensor | None = None
    candidates: tuple[np.ndarray, np.ndarray] | None = None


class MedusaCandidates(TreeCandidateGenerator):
    """
    Drafts with Medusa heads: one small forward for all rows and depths. Trees have the nodes of the highest joint
    probability; each head's probabilities are calibrated by how often its candidates were accepted. (Medusa's section
    2.3.3 chooses one tree for all texts instead, as `tree` does.)

    Args:
        heads (`MedusaHeads`): On the target's device. `MedusaHeads.from_pretrained(folder, target)` reads files.
        num_nodes (`int`, *optional*): Nodes of a tree where the caller names no number, at most: 32, or all of a fixed
            tree.
        tree (sequence of sequences of `int`, *optional*): A fixed tree: for every node, the ranks of the tokens on its
            path, such as `[(0,), (1,), (0, 0)]`. Where fewer nodes are wanted, it keeps the first of the least depth.
        calibrator (`Calibrator`, *optional*): Calibrates the heads' probabilities; by default, they stay raw.

    Raises:
        ValueError: for a number of nodes below 1, or a tree that is none, or deeper than there are heads.
    """

    label = "medusa"
    needs = frozenset({HIDDEN_STATES})
    heeds_shapes = True
    follows_target = True
    is_learned = True
    hidden_layers = (LAST,)

    def __init__(
        self,
        heads: MedusaHeads,
        num_nodes: int | None = None,
        tree: Sequence[Sequence[int]] | None = None,
        calibrator: Calibrator | None = None,
    ):
        if num_nodes is not None:
            check_positive("num_nodes", num_nodes)
        paths = [] if tree is None else _checked(tree, heads.num_heads)
        self.heads, self.default_num_nodes = heads, num_nodes or len(paths) or _NUM_NODES
        self._width = max([_WIDTH, *(1 + max(path) for path in paths)])
        self._tree = FixedTree(paths) if paths else None
        self._calibration = None if calibrator is None else DepthCalibration(calibrator, self.name, heads.num_heads)
        self._states: dict[Hashable, _State] = {}

    @property
    def name(self) -> str:
        return f"{type(self).__name__}({self.heads.identity})"

    def begin(self, request: SourceRequest) -> int:
        self._states[request.request_id] = _State()
        return request.num_cached  # only the newest hidden state is used

    def observe(self, request_id: Hashable, committed: Committed) -> None:
        state, hidden = self._states[request_id], committed.hidden_states.get(LAST)
        if state.candidates is not None and len(committed.tokens):
            if self._calibration is not None:
                self._calibration.learn(*state.candidates, committed.tokens)
            state.candidates = None
        if hidden is not None and len(hidden):
            state.hidden = hidden[-1]

    def stop(self, request_id: Hashable) -> None:
        self._states.pop(request_id, None)

    def propose(
        self, request_ids: Sequence[Hashable], max_nodes: Sequence[int], price: LevelPrice | None = None
    ) -> list[DraftTree]:
        """Draft the best trees, or full ones where a policy fixes their shape: each head's so many likeliest tokens."""
        widths = () if price is None else price.widths[: self.heads.num_heads]
        trees = [DraftTree.empty()] * len(request_ids)
        states = [self._states[name] for name in request_ids]
        asked = [(row, state.hidden) for row, state in enumerate(states) if state.hidden is not None and max_nodes[row]]
        if not asked:
            return trees
        hidden = torch.stack([hidden for _, hidden in asked])
        tokens, probs = fetch_together(self.heads.best(hidden, max(self._width, *widths, 0)))
        worth = probs if self._calibration is None else self._calibration.calibrated(probs)
        limits = [max_nodes[row] for row, _ in asked]
        for number, ((row, _), tree) in enumerate(zip(asked, self._trees(tokens, worth, limits, widths))):
            trees[row] = tree
            states[row].candidates = tokens[number], probs[number]
        return trees

    def _trees(
        self, tokens: np.ndarray, probs: np.ndarray, limits: Sequence[int], widths: tuple[int, ...]
    ) -> list[DraftTree]:
        tree = full_tree(widths) if widths else self._tree
        if tree is None:
            return best_trees(tokens, probs[:, 0], probs[:, 1:, None], limits)
        return [tree.of(*row) for row in zip(tokens, probs, limits)]


def _checked(tree: Sequence[Sequence[int]], num_heads: int) -> list[tuple[int, ...]]:
    """Return the paths, parents first."""
    paths = sorted(dict.fromkeys(map(tuple, tree)), key=len)
    known = {(), *paths}
    for path in paths:
        if not path or len(path) > num_heads or path[:-1] not in known or min(path) < 0:
            raise ValueError(
                f"`tree` must hold paths of 1 to {num_heads} ranks of 0 or more, with the paths that they go on from, "
                f"got {path}."
            )
    if not paths:
        raise ValueError("`tree` must hold at least one path.")
    return paths


class DepthCalibration:
    """
    Table of calibrated probabilities of the heads' candidates at each depth. Asking a calibrator about every candidate
    would cost more than drafting.

    Args:
        calibrator (`Calibrator`): Has the source under `name`.
        num_depths (`int`): K.
    """

    def __init__(self, calibrator: Calibrator, name: str, num_depths: int):
        self._calibrator, self._name, self._num_depths = calibrator, name, num_depths
        self._pending: list[tuple[np.ndarray, int, np.ndarray]] = []
        self._num_pending = self._num_learnt = 0
        self._table = self._made()

    def _made(self) -> np.ndarray:
        scores = np.tile(np.linspace(0.0, 1.0, _NUM_SCORES), self._num_depths)
        depths = np.repeat(np.arange(1, self._num_depths + 1), _NUM_SCORES)
        return self._calibrator.calibrate(self._name, scores, depths, 0).reshape(self._num_depths, _NUM_SCORES)

    def calibrated(self, probs: np.ndarray) -> np.ndarray:
        """Return calibrated probabilities of raw ones `[B, depths, w]`, both best first, of at most K depths."""
        if self._num_pending >= min(_MOST_PENDING, 8 + self._num_learnt // 4):
            self._flush()
        place = probs.clip(0.0, 1.0) * (_NUM_SCORES - 1)
        low = np.minimum(place.astype(np.int64), _NUM_SCORES - 2)
        depth = np.arange(probs.shape[1])[None, :, None]
        part = place - low
        found = (1 - part) * self._table[depth, low] + part * self._table[depth, low + 1]
        return np.minimum.accumulate(found, axis=2)

    def learn(self, tokens: np.ndarray, probs: np.ndarray, truth: np.ndarray) -> None:
        """
        Take one row's candidates `[depths, w]`, their raw probabilities, and the tokens that followed. A depth counts
        if all tokens before it were among the candidates: only there do trees have nodes.
        """
        for depth, token in enumerate(truth[: len(tokens)].tolist()):
            hits = tokens[depth] == token
            self._pending.append((probs[depth], depth + 1, hits))
            self._num_pending += len(hits)
            if not hits.any():
                break

    def _flush(self) -> None:
        scores = np.concatenate([scores for scores, _, _ in self._pending])
        hits = np.concatenate([hits for _, _, hits in self._pending])
        depths = np.repeat([depth for _, depth, _ in self._pending], [len(hits) for _, _, hits in self._pending])
        self._calibrator.update(self._name, scores, depths, np.zeros(len(scores), np.int64), hits)
        self._num_learnt += len(scores)
        self._pending, self._num_pending = [], 0
        self._table = self._made()
