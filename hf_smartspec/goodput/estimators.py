"""How likely drafts are accepted, judged by what was accepted lately: over all requests, and per request and depth."""

from collections.abc import Hashable, Sequence

import numpy as np

_CERTAIN = 0.995  # no rate is estimated above: a perfect record proves little


class AcceptanceEstimator:
    """
    Moving averages of the acceptance rate (SmartSpec, section 4.4): of all requests, per depth, and per request.

    A level of a draft is tried if all levels above it came true, and succeeds if one of its nodes does. Counts decay,
    so that the averages follow the text. What was seen little is drawn to what is known in general: a depth to the
    level above it, a request to the average of all.

    Args:
        half_life (`float`): Tried levels after which one counts half in the averages over all requests. The paper finds
            results hardly sensitive to the window.
        request_half_life (`float`): The same for one request's.
        prior (`float`): The rate before anything is known. Optimistic: it takes a try to find out.
    """

    _STRENGTH = 4.0  # of the general knowledge, in tried levels

    def __init__(self, half_life: float = 300.0, request_half_life: float = 30.0, prior: float = 0.7):
        for name, value in (("half_life", half_life), ("request_half_life", request_half_life)):
            if not np.isfinite(value) or value <= 0:
                raise ValueError(f"`{name}` must be a positive number, got {value!r}.")
        if not 0 <= prior <= 1:
            raise ValueError(f"`prior` must lie in [0, 1], got {prior!r}.")
        self.half_life, self.request_half_life, self.prior = half_life, request_half_life, prior
        self._tried, self._succeeded = np.zeros(1), np.zeros(1)  # per depth
        self._requests: dict[Hashable, tuple[float, float]] = {}  # expected and observed successes, decayed

    def update(self, request_ids: Sequence[Hashable], tried: np.ndarray, succeeded: np.ndarray) -> None:
        """
        Args:
            request_ids (sequence of `Hashable`): The rows.
            tried, succeeded (`np.ndarray` of shape `[rows, depths]`, bool): Which levels of each row's draft could be
                judged, and which of them came true.
        """
        num_depths = tried.shape[1]
        rates = self.by_depth(num_depths)
        expected, observed = tried @ rates, succeeded.sum(axis=1)
        numbers = tried.sum(axis=1)
        for name, num, more_expected, more in zip(request_ids, numbers.tolist(), expected.tolist(), observed.tolist()):
            if num:
                old_expected, old = self._requests.get(name, (0.0, 0.0))
                decay = 0.5 ** (num / self.request_half_life)
                self._requests[name] = (old_expected * decay + more_expected, old * decay + more)
        missing = num_depths - len(self._tried)
        if missing > 0:
            self._tried, self._succeeded = (np.append(old, np.zeros(missing)) for old in (self._tried, self._succeeded))
        decay = 0.5 ** (numbers.sum() / self.half_life)
        self._tried *= decay
        self._succeeded *= decay
        self._tried[:num_depths] += tried.sum(axis=0)
        self._succeeded[:num_depths] += succeeded.sum(axis=0)

    @property
    def rate(self) -> float:
        """alpha over all requests and depths."""
        return self._drawn(self._succeeded.sum(), self._tried.sum(), self.prior)

    def by_depth(self, num_depths: int) -> np.ndarray:
        """The rate at depths 1 to `num_depths`, given that the levels above came true; `[num_depths]` float64."""
        rates, rate = [], self.rate
        for tried, succeeded in zip(self._tried[:num_depths].tolist(), self._succeeded[:num_depths].tolist()):
            rate = self._drawn(succeeded, tried, rate)
            rates.append(rate)
        return np.array(rates + [rate] * (num_depths - len(rates)))

    def of_requests(self, request_ids: Sequence[Hashable], num_depths: int = 1) -> np.ndarray:
        """The same for each request, `[rows, num_depths]` float64: all depths scaled by how it does on the whole."""
        return np.minimum(self.by_depth(num_depths) * self._ratios(request_ids)[:, None], _CERTAIN)

    def rates(self, request_ids: Sequence[Hashable]) -> np.ndarray:
        """alpha of each request, one for all depths; `[rows]` float64."""
        return np.minimum(self.rate * self._ratios(request_ids), _CERTAIN)

    def _ratios(self, request_ids: Sequence[Hashable]) -> np.ndarray:
        """Observed successes by expected ones."""
        sums = [self._requests.get(name, (0.0, 0.0)) for name in request_ids]
        expected, observed = np.array(sums).reshape(-1, 2).T
        prior = self._STRENGTH * self.rate
        return (observed + prior) / np.maximum(expected + prior, 1e-9)

    def _drawn(self, succeeded: float, tried: float, general: float) -> float:
        return min(float((succeeded + self._STRENGTH * general) / (tried + self._STRENGTH)), _CERTAIN)

    def forget(self, request_id: Hashable) -> None:
        """The request has ended. Unknown ids are ignored."""
        self._requests.pop(request_id, None)
