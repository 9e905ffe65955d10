"""The cost of a step: SmartSpec's linear model, with a curve where a line fails, corrected by every step."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from .cost_fit import Measurements, fit_coefficients
from .kernels.forwards import by_tokens, correct, write_doubts

_NUM_BINS = 21  # bins of the running correction,
_BINS = 2.0 ** np.arange(_NUM_BINS)  # at 1, 2, 4, ... tokens per forward
_WRONG = 1.5  # ratio of two sizes' corrections from which a profile counts as wrong
_PROOF = 24.0  # observations that a size needs for that
_LONGEST = 2048.0  # tokens up to which a mended line gets a curve
_STEADY = 0.2  # mean error of predictions up to which the machine is taken to be otherwise idle
_MEMORY = 0.05  # weight of the newest error in that mean

# Standard deviations of the logarithm of measured / predicted seconds of a step:
_STEP = 0.1  # of single steps
_SCALE, _SHAPE = 2.0, 0.45  # of a profile: of a factor common to all sizes, and of each size's own factor
_SCALE_DRIFT, _SHAPE_DRIFT = 0.01, 0.004  # of the change of these factors between two steps
_REACH = 2.0  # bins over which the correlation of two sizes' own factors falls to 1/e
UNKNOWN = 0.16  # of a size's factor relative to that of another: from here on, the size is in doubt
_SURPRISE = 2.0  # standard deviations beyond which a step may be a disturbance of the machine,
_DISTURBED = 0.5  # and the share of a longer delay that counts as its deviation then, so that the size stays in doubt
_LIMITS = np.array([_STEP, _SURPRISE, _DISTURBED, UNKNOWN])


def _covariance(scale: float, shape: float) -> np.ndarray:
    """Return the covariance of the log factors of all bins, `[bins, bins]` float64."""
    bins = np.arange(_NUM_BINS)
    return scale**2 + shape**2 * np.exp(-np.abs(bins[:, None] - bins) / _REACH)


_DOUBT = _covariance(_SCALE, _SHAPE)
_DRIFT = _covariance(_SCALE_DRIFT, _SHAPE_DRIFT)
# Share of the doubt that is dropped at every step. Without it, drift would add up for sizes that no step has: after
# weeks, an optimistic estimate would take them to be free. With it, a size's own factor is never more uncertain than
# before the first step.
_FADING = (_SHAPE_DRIFT / _SHAPE) ** 2


class CostPoint(NamedTuple):
    """One measured forward."""

    context: int  # N_context, tokens of context read, over all rows
    batched: int  # N_batched, tokens in the packed forward
    width: int  # tokens of the row that has most
    seconds: float


class StepSeconds(NamedTuple):
    """Seconds of one step by kind of work."""

    draft: float  # and selecting
    forward: float
    other: float = 0.0  # verification, commit


@dataclass
class CostModel:
    """
    Seconds of one forward (SmartSpec, Eq. 7, with terms for attention and for the host):

        T = max(host, alpha * N_context + beta * N_context * width + f(N_batched))

    f is the line gamma * N_batched + delta, or where that does not fit, a monotone curve of straight pieces: with the
    jump from 1 token to 2, where CPUs change from matrix-vector to matrix products, and the knee after which a GPU is
    bound by its multipliers and no longer by its memory. `alpha` is the cost of reading keys and values, `beta` the
    cost of each query per column. Attention is padded to the row with most queries, `width`; Eq. 7 leaves this out, but
    it matters on CPUs. `host` is the time to launch a forward's kernels: a GPU works meanwhile, so that shorter work on
    the device adds no time.

    `observe` corrects predictions while serving, by a factor per size of the forward, learnt from measured steps. No
    size of which little is known costs more than a larger one, or less than a smaller one, whose cost steps have shown.

    Args:
        alpha, beta, gamma (`float`): Seconds per context token, per query and column, per batched token.
        delta (`float`): Seconds of any forward.
        knots, curve (sequences of `float`): Rising numbers of tokens, and f in seconds there; both empty for the line.
        host (`float`): Least seconds of a forward.
        is_provisional (`bool`): Whether the machine was busy when the profile was measured.

    Raises:
        ValueError: for negative numbers, knots that do not rise, a curve that falls, or forwards without any cost.
    """

    alpha: float
    gamma: float
    delta: float
    beta: float = 0.0
    knots: Sequence[float] = ()
    curve: Sequence[float] = ()
    host: float = 0.0
    is_provisional: bool = False
    _log_factors: np.ndarray = field(default_factory=lambda: np.zeros(_NUM_BINS), repr=False, compare=False)
    _doubt: np.ndarray = field(default_factory=_DOUBT.copy, repr=False, compare=False)  # covariance of the log factors
    _num_observed: np.ndarray = field(default_factory=lambda: np.zeros(_NUM_BINS), repr=False, compare=False)
    _mean_error: float = field(default=0.0, repr=False, compare=False)  # absolute, of logarithms
    _is_corrected: bool = field(default=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("alpha", "beta", "gamma", "delta", "host"):
            value = getattr(self, name)
            if not np.isfinite(value) or value < 0:
                raise ValueError(f"`{name}` must be a number of at least 0, got {value!r}.")
            setattr(self, name, float(value))
        if len(self.knots) != len(self.curve) or len(self.knots) == 1:
            raise ValueError(
                f"`knots` and `curve` must have one length, 0 or at least 2, got {len(self.knots)} and "
                f"{len(self.curve)}."
            )
        if (np.diff(self.knots) <= 0).any() or (np.diff(self.curve) < 0).any() or min(self.curve, default=0) < 0:
            raise ValueError(f"`knots` must rise and `curve` must not fall, got {self.knots} and {self.curve}.")
        self.knots, self.curve = tuple(map(float, self.knots)), tuple(map(float, self.curve))
        if self.profiled(0, 1) <= 0:
            raise ValueError("A forward must cost something: `gamma`, `delta` and `curve` make it free.")

    def seconds(self, context: Any, batched: Any, width: Any = 1) -> Any:
        """
        Return the predicted seconds of forwards, corrected by observed steps.

        Args:
            context, batched, width (numbers or arrays that broadcast): Context tokens read, tokens in the forward, and
                tokens of the widest row.

        Returns:
            `np.ndarray` of their common shape, float64; a float for numbers.
        """
        factor = self._log_factor(batched)
        return self.profiled(context, batched, width) * (
            math.exp(factor) if isinstance(factor, float) else np.exp(factor)
        )

    def observe(self, context: float, batched: float, seconds: float, width: float = 1) -> None:
        """Learn from one measured step. Arguments are as in `seconds`; `seconds` is the measured time."""
        predicted = float(self.seconds(context, batched, width))
        if not (predicted > 0 and seconds > 0 and math.isfinite(seconds)):
            return
        low, share = self._bin(batched)
        self._is_corrected = True
        self._mean_error += _MEMORY * (min(abs(math.log(seconds / predicted)), 1.0) - self._mean_error)
        sizes = self._with_context(context, self._seconds_of_bins, width)
        doubt = np.empty_like(self._doubt)  # a new one: calls in other threads may observe at the same time
        correct(
            low, share, predicted, seconds, sizes, _LIMITS, 1 - _FADING, _DRIFT, self._doubt, self._log_factors, doubt
        )
        self._doubt = doubt
        self._num_observed[low] += 1 - share
        self._num_observed[low + 1] += share

    def correction(self, batched: float) -> float:
        """Return the factor between recent steps of this size and the profile."""
        return math.exp(self._log_factor(batched))

    @property
    def is_wrong(self) -> bool:
        """
        Return whether recent steps differ from the profile as a busy machine explains that measured it: steps of some
        sizes much more than others, or all of them much faster, in enough observations, while steps of one size agree.
        A machine that is slower as a whole is no such sign, and on a machine that is busy now the question stays open.
        """
        if self._mean_error > _STEADY:
            return False
        proven = self._log_factors[self._num_observed >= _PROOF]
        if not len(proven):
            return False
        return float(np.ptp(proven)) > math.log(_WRONG) or float(proven.min()) < -math.log(_WRONG)

    def mended(self) -> "CostModel":
        """Return a profile with the corrections in it: for context and the host, their mean over observed sizes."""
        weights = self._num_observed if self._num_observed.any() else None
        scale = math.exp(np.average(self._log_factors, weights=weights))
        last = max(self.knots, default=_LONGEST)
        knots = sorted({*self.knots, *(2.0**place for place in range(_NUM_BINS) if 2.0**place <= last)})
        curve = np.maximum.accumulate(self._tokens_seconds(np.array(knots)) * np.exp(self._log_factor(np.array(knots))))
        changed = {name: scale * getattr(self, name) for name in ("alpha", "beta", "host")}
        return CostModel(**self.as_dict() | changed | {"knots": knots, "curve": curve.tolist()})

    def profiled(self, context: Any, batched: Any, width: Any = 1) -> Any:
        """Return `seconds` without the correction, which never falls with the size of a forward."""
        return self._with_context(context, self._tokens_seconds(batched), width)

    def _with_context(self, context: Any, tokens_seconds: Any, width: Any) -> Any:
        device = (self.alpha + self.beta * width) * context + tokens_seconds
        if not self.host:
            return device
        return max(device, self.host) if isinstance(device, float) else np.maximum(device, self.host)

    def _tokens_seconds(self, batched: Any) -> Any:
        if not self.knots:
            return self.gamma * batched + self.delta
        if isinstance(batched, (int, float)):  # numpy is slow on single numbers
            at = min(bisect_right(self.knots, batched, 1), len(self.knots) - 1)
            (x0, x1), (y0, y1) = self.knots[at - 1 : at + 1], self.curve[at - 1 : at + 1]
            return y0 + (max(batched, self.knots[0]) - x0) * (y1 - y0) / (x1 - x0)
        (x0, x1), (y0, y1) = self.knots[-2:], self.curve[-2:]
        beyond = np.maximum(batched - x1, 0.0) * ((y1 - y0) / (x1 - x0))
        return np.interp(batched, self.knots, self.curve) + beyond

    def by_tokens(self, first: int, num: int, lowered: Any = None) -> tuple[np.ndarray, np.ndarray]:
        """
        Return f(N) in seconds by the profile for N = `first`, `first` + 1, ... tokens, and the correction factors of
        such forwards, `[num]` float64 each. With `lowered` (`[num]`), their logarithms are lowered by so much, but no
        size costs less than a smaller one.
        """
        seconds, factors = np.empty((2, num))
        by_tokens(first, *self._curve, self.gamma, self.delta, self._log_factors, seconds, factors)
        if lowered is not None:
            costs = np.maximum.accumulate(seconds * factors * np.exp(-lowered))
            np.divide(costs, seconds, out=factors, where=seconds > 0)
        return seconds, factors

    def doubt(self, batched: Any, other: float) -> Any:
        """Return the log standard deviation of the cost of sizes (numbers or `[n]`) relative to that of another."""
        sizes = np.array(batched, np.float64, ndmin=1)
        doubts = np.empty_like(sizes)
        write_doubts(sizes, other, self._doubt, doubts)
        return doubts if np.ndim(batched) else doubts[0]

    @cached_property
    def _seconds_of_bins(self) -> np.ndarray:
        return np.asarray(self._tokens_seconds(_BINS))

    @cached_property
    def _curve(self) -> tuple[np.ndarray, np.ndarray]:
        return np.array(self.knots, np.float64), np.array(self.curve, np.float64)

    def _bin(self, batched: Any) -> tuple[Any, Any]:
        """Return the bin below a size, and the size's distance from it, in [0, 1)."""
        if isinstance(batched, (int, float)) or not np.ndim(batched):  # numpy is slow on single numbers
            place = min(max(math.log2(max(batched, 1)), 0.0), _NUM_BINS - 1.001)
            return int(place), place - int(place)
        places = np.clip(np.log2(np.maximum(batched, 1)), 0, _NUM_BINS - 1.001)
        low = np.floor(places).astype(np.int64)
        return low, places - low

    def _log_factor(self, batched: Any) -> Any:
        if not self._is_corrected:
            return 0.0
        low, share = self._bin(batched)
        factor = self._log_factors[low] * (1 - share) + self._log_factors[low + 1] * share
        return factor if isinstance(low, np.ndarray) else float(factor)

    @classmethod
    def fit(cls, points: Sequence[CostPoint]) -> "CostModel":
        """
        Fit measured forwards by least squares of the relative error, with all coefficients at least 0. The curve, and
        the host's time, are used only where they explain more than noise would.

        Raises:
            ValueError: for fewer than four points, or seconds that are not positive.
        """
        if len(points) < 4:
            raise ValueError(f"`points` must be at least 4 measurements, got {len(points)}.")
        context, batched, width, seconds = np.array(points, np.float64).T
        if not (seconds > 0).all():
            raise ValueError(f"`points` must have positive seconds, got {float(seconds.min())}.")
        return cls(**fit_coefficients(Measurements(context, batched, width, seconds)))

    def errors(self, points: Sequence[CostPoint]) -> np.ndarray:
        """Return the relative errors of predictions, `[n]` float64: above 0 where they are too high."""
        context, batched, width, seconds = np.array(points, np.float64).T
        return self.seconds(context, batched, width) / seconds - 1

    def median_error(self, points: Sequence[CostPoint]) -> float:
        """Return the median of the absolute relative errors."""
        return float(np.median(np.abs(self.errors(points))))

    def as_dict(self) -> dict[str, Any]:
        """Return the profile as plain numbers, without the corrections that were learnt while serving."""
        return {name: value for name, value in asdict(self).items() if not name.startswith("_")}

    @classmethod
    def from_dict(cls, numbers: dict[str, Any]) -> "CostModel":
        """
        Make a cost model of the numbers that `as_dict` returns.

        Raises:
            ValueError: for entries that are missing, unknown or not valid.
        """
        try:
            return cls(**numbers)
        except TypeError as error:
            raise ValueError(f"Not a cost model: {error}") from error
