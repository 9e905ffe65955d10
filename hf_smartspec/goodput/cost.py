"""What a step costs: SmartSpec's linear model, bent where the line fails, fitted to measurements, kept up to date."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from .cost_fit import Measurements, fit_coefficients
from .kernels.forwards import by_tokens

_NUM_BINS = 21  # of the running correction, at 1, 2, 4, ... tokens per forward
_WRONG = 1.5  # factor by which corrections of two sizes differ where the profile is not this machine's
_PROOF = 24.0  # observations of each of the two, by then
_STEADY = 0.2  # mean error of predictions, up to which the machine is taken to do nothing else
_MEMORY = 0.05  # weight of the newest error in it

# Of the logarithm of what a step takes by what is predicted, as standard deviations:
_STEP = 0.1  # of single steps
_SCALE, _SHAPE = 1.5, 0.25  # of a profile: of all sizes together, which says little, and of each of them beside that
_SCALE_DRIFT, _SHAPE_DRIFT = 0.01, 0.004  # of what comes between two steps
_REACH = 2.0  # bins after which what is known of a size's shape counts 1/e for another
_SURPRISE = 2.0  # beyond which a step counts less: a hiccup of the machine is no news


def _covariance(scale: float, shape: float) -> np.ndarray:
    """Of the log factors of all bins, `[bins, bins]` float64."""
    bins = np.arange(_NUM_BINS)
    return scale**2 + shape**2 * np.exp(-np.abs(bins[:, None] - bins) / _REACH)


_DOUBT = _covariance(_SCALE, _SHAPE)
_DRIFT = _covariance(_SCALE_DRIFT, _SHAPE_DRIFT)
# Share of the doubt that goes with every step. Without it, drift would add up for sizes that no step has: after weeks,
# they would seem to be free in doubt. With it, a size's shape is never less known than before the first step.
_FADING = (_SHAPE_DRIFT / _SHAPE) ** 2


class CostPoint(NamedTuple):
    """One measured forward."""

    context: int  # N_context, tokens of context read, over all rows
    batched: int  # N_batched, tokens in the packed forward
    width: int  # tokens of the row that has most
    seconds: float


class StepSeconds(NamedTuple):
    """Where the time of one step went."""

    draft: float
    forward: float
    other: float = 0.0  # layout, selection, verification, commit, observation


@dataclass
class CostModel:
    """
    Seconds of one forward (SmartSpec, Eq. 7, with terms for attention and for the host):

        T = max(host, alpha * N_context + beta * N_context * width + f(N_batched))

    f is the line gamma * N_batched + delta, or where that misses some sizes, a monotone curve of straight
    pieces: through the jump from 1 token to 2, where CPUs turn from matrix-vector to matrix products, and the knee
    behind which a GPU waits for its multipliers and no longer for its memory. `alpha` is what reading keys and values
    costs, `beta` what each query costs per column. Attention is padded to the row with most queries, `width`; Eq. 7
    leaves this out, and CPUs notice it. `host` is the time that launching a forward's kernels takes: a GPU works
    meanwhile, and whatever it does in less time costs nothing.

    `observe` corrects the prediction while serving: a factor per size of the forward, learnt from measured steps.

    Args:
        alpha, beta, gamma (`float`): Seconds per context token, per query and column, per batched token.
        delta (`float`): Seconds of any forward.
        knots, curve (sequences of `float`): f at rising numbers of tokens; both empty for the line.
        host (`float`): Seconds that a forward takes at least.
        is_provisional (`bool`): Whether the machine was busy when this was measured.
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
            raise ValueError("A forward must cost something: `gamma`, `delta` and `curve` say that it costs nothing.")

    def seconds(self, context: Any, batched: Any, width: Any = 1) -> Any:
        """
        Predicted seconds of forwards, corrected by what was observed.

        Args:
            context, batched, width (numbers or arrays that broadcast): Context tokens read, tokens in the forward, and
                tokens of the row that has most.

        Returns:
            `np.ndarray` of their common shape, float64; a float for numbers.
        """
        factor = self._log_factor(batched)
        return self.profiled(context, batched, width) * (
            math.exp(factor) if isinstance(factor, float) else np.exp(factor)
        )

    def observe(self, context: float, batched: float, seconds: float, width: float = 1) -> None:
        """Learns from one measured step."""
        predicted = float(self.seconds(context, batched, width))
        if not (predicted > 0 and seconds > 0 and math.isfinite(seconds)):
            return
        low, share = self._bin(batched)
        self._is_corrected = True
        doubt = (1 - _FADING) * self._doubt + _DRIFT  # a copy: calls in other threads may observe at the same time
        shared = (1 - share) * doubt[low] + share * doubt[low + 1]  # covariance of this size and each bin
        variance = float((1 - share) * shared[low] + share * shared[low + 1]) + _STEP**2
        error = math.log(seconds / predicted)
        self._mean_error += _MEMORY * (min(abs(error), 1.0) - self._mean_error)
        gain = shared / (variance * max(abs(error) / (_SURPRISE * math.sqrt(variance)), 1.0))
        self._log_factors += gain * error
        self._doubt = doubt - np.multiply.outer(gain, shared)
        self._num_observed[low] += 1 - share
        self._num_observed[low + 1] += share

    def correction(self, batched: float) -> float:
        """The factor by which steps of this size have lately differed from the profile."""
        return math.exp(self._log_factor(batched))

    @property
    def is_doubtful(self) -> bool:
        """
        Whether sizes that were not observed may cost far more, or less, than predicted by those that were. A profile
        that is wrong as a whole is doubted, too, not only one whose factors differ: while all steps are of one size,
        all factors move together, and show nothing of errors in the shape, which are likely where the scale is wrong.
        Doubt costs little where the shape is right: sizes that were tried are known.
        """
        return self.is_provisional or float(np.abs(self._log_factors).max()) > math.log(_WRONG)

    @property
    def is_wrong(self) -> bool:
        """
        Whether steps of some sizes have lately differed from the profile much more than others, and that was seen often
        enough, and steps of a size were alike: then it was measured while the machine did other things, say. A machine
        that is slower as a whole is no sign of that, and one that does other things now cannot tell.
        """
        if self._mean_error > _STEADY:
            return False
        proven = self._log_factors[self._num_observed >= _PROOF]
        return len(proven) > 1 and float(np.ptp(proven)) > math.log(_WRONG)

    def profiled(self, context: Any, batched: Any, width: Any = 1) -> Any:
        """`seconds` before any correction: never less for larger forwards."""
        device = (self.alpha + self.beta * width) * context + self._tokens_seconds(batched)
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

    def by_tokens(self, first: int, num: int, optimism: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
        """
        f(N) in seconds for N = `first`, `first` + 1, ... tokens, by the profile, and what predictions for forwards of
        so many are multiplied with: `[num]` float64 each. With `optimism`, the factors are so many standard deviations
        lower, for what is not known of a size beside the first.
        """
        seconds, factors = np.empty((2, num))
        logs = self._log_factors - optimism * self._doubts(first) if optimism else self._log_factors
        by_tokens(first, *self._curve, self.gamma, self.delta, logs, seconds, factors)
        return seconds, factors

    def doubt(self, batched: float, other: float) -> float:
        """How little is known of what forwards of one size take by those of another: a log standard deviation."""
        low, share = self._bin(batched)
        doubts = self._doubts(other)
        return float((1 - share) * doubts[low] + share * doubts[low + 1])

    def _doubts(self, than: float) -> np.ndarray:
        """Of all bins beside a size, `[bins]` float64: log standard deviations."""
        low, share = self._bin(than)
        shared = (1 - share) * self._doubt[low] + share * self._doubt[low + 1]
        own = (1 - share) * shared[low] + share * shared[low + 1]
        return np.sqrt(np.maximum(self._doubt.diagonal() + own - 2 * shared, 0.0))

    @cached_property
    def _curve(self) -> tuple[np.ndarray, np.ndarray]:
        return np.array(self.knots, np.float64), np.array(self.curve, np.float64)

    def _bin(self, batched: Any) -> tuple[Any, Any]:
        """Between which two bins a size lies, and how far from the lower one."""
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
        Fits measured forwards by least squares of the relative error, all coefficients at least 0. The curve is taken
        in place of the line, and a time of the host's, where this explains more than noise would.

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
        """Relative errors of the prediction, `[n]` float64: above 0 where it is too high."""
        context, batched, width, seconds = np.array(points, np.float64).T
        return self.seconds(context, batched, width) / seconds - 1

    def median_error(self, points: Sequence[CostPoint]) -> float:
        """Median of the absolute relative errors."""
        return float(np.median(np.abs(self.errors(points))))

    def as_dict(self) -> dict[str, Any]:
        """The profile as plain numbers, without what was learnt while serving."""
        return {name: value for name, value in asdict(self).items() if not name.startswith("_")}

    @classmethod
    def from_dict(cls, numbers: dict[str, Any]) -> "CostModel":
        """
        Raises:
            ValueError: for entries that are missing, unknown or no cost.
        """
        try:
            return cls(**numbers)
        except TypeError as error:
            raise ValueError(f"Not a cost model: {error}") from error
