"""What heads' probabilities are worth: by depth, from how their candidates fared."""

import numpy as np

from ..calibrator import ProbabilityCalibrator

_NUM_SCORES = 64
_MOST_PENDING = 256  # observations that wait for the table to be made anew


class DepthCalibration:
    """
    A table of one source, since asking a calibrator about every candidate costs more than to draft.

    Args:
        calibrator (`ProbabilityCalibrator`): Knows the source under `name`.
        num_depths (`int`): K.
    """

    def __init__(self, calibrator: ProbabilityCalibrator, name: str, num_depths: int):
        self._calibrator, self._name, self._num_depths = calibrator, name, num_depths
        self._pending: list[tuple[np.ndarray, int, np.ndarray]] = []
        self._num_pending = self._num_learnt = 0
        self._table = self._made()

    def _made(self) -> np.ndarray:
        scores = np.tile(np.linspace(0.0, 1.0, _NUM_SCORES), self._num_depths)
        depths = np.repeat(np.arange(1, self._num_depths + 1), _NUM_SCORES)
        return self._calibrator.calibrate(self._name, scores, depths, 0).reshape(self._num_depths, _NUM_SCORES)

    def calibrated(self, probs: np.ndarray) -> np.ndarray:
        """Raw probabilities `[B, K, w]`, best first, as they have come true; still best first."""
        if self._num_pending >= min(_MOST_PENDING, 8 + self._num_learnt // 4):
            self._flush()
        place = probs.clip(0.0, 1.0) * (_NUM_SCORES - 1)
        low = np.minimum(place.astype(np.int64), _NUM_SCORES - 2)
        depth = np.arange(self._num_depths)[None, :, None]
        part = place - low
        found = (1 - part) * self._table[depth, low] + part * self._table[depth, low + 1]
        return np.minimum.accumulate(found, axis=2)

    def learn(self, tokens: np.ndarray, probs: np.ndarray, truth: np.ndarray) -> None:
        """
        Of one row: the candidates `[K, w]`, their raw probabilities, and the tokens that came. A depth teaches where
        all tokens before it were among the candidates: only there trees have nodes.
        """
        for depth, token in enumerate(truth[: self._num_depths].tolist()):
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
