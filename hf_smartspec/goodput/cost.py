"""What a step costs: SmartSpec's linear model, bent where the line fails, fitted to measurements, kept up to date."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from .least_squares import nonnegative_least_squares

_BEND = 0.05  # median relative error above which the straight line gives way to a curve
_NUM_BINS = 21  # of the running correction, at 1, 2, 4, ... tokens per forward
_TRUST = 3.0  # in a profile before any observation, in observations
_MIN_GAIN = 0.1  # weight of the newest observation of a size that is seen at every step ...
_STALENESS = 0.99  # ... and more where the earlier ones are old: what they count after every step
_RELAXATION = 0.001  # by which all sizes follow the one that was seen: the machine as a whole may have become slower
_LARGEST_STEP = 0.4  # of one observation's log ratio: a hiccup of the machine is no news


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
    Seconds of one forward (SmartSpec, Eq. 7, with a term for attention):

        T = alpha * N_context + beta * N_context * width + f(N_batched)

    f is the line gamma * N_batched + delta, or where that misses, a monotone piecewise-linear curve through `curve`.
    `alpha` is what reading keys and values costs, `beta` what each query costs per column. Attention is padded to the
    row with most queries, `width`; Eq. 7 leaves this out, and CPUs notice it.

    `observe` corrects the prediction while serving: a factor per size of the forward, learnt from measured steps.

    Args:
        alpha, beta, gamma (`float`): Seconds per context token, per query and column, per batched token.
        delta (`float`): Seconds of any forward.
        knots, curve (sequences of `float`): f at rising numbers of tokens; both empty for the line.
    """

    alpha: float
    gamma: float
    delta: float
    beta: float = 0.0
    knots: Sequence[float] = ()
    curve: Sequence[float] = ()
    _log_factors: np.ndarray = field(default_factory=lambda: np.zeros(_NUM_BINS), repr=False, compare=False)
    _num_seen: np.ndarray = field(default_factory=lambda: np.full(_NUM_BINS, _TRUST), repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("alpha", "beta", "gamma", "delta"):
            value = getattr(self, name)
            if not np.isfinite(value) or value < 0:
                raise ValueError(f"`{name}` must be a number of at least 0, got {value!r}.")
        if len(self.knots) != len(self.curve) or len(self.knots) == 1:
            raise ValueError(
                f"`knots` and `curve` must have one length, 0 or at least 2, got {len(self.knots)} and "
                f"{len(self.curve)}."
            )
        if (np.diff(self.knots) <= 0).any() or (np.diff(self.curve) < 0).any() or min(self.curve, default=0) < 0:
            raise ValueError(f"`knots` must rise and `curve` must not fall, got {self.knots} and {self.curve}.")
        self.knots, self.curve = tuple(map(float, self.knots)), tuple(map(float, self.curve))
        if self._tokens_seconds(1) <= 0:
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
        return self.profiled(context, batched, width) * np.exp(self._log_factor(batched))

    def observe(self, context: float, batched: float, seconds: float, width: float = 1) -> None:
        """Learns from one measured step."""
        predicted = float(self.seconds(context, batched, width))
        if not (predicted > 0 and seconds > 0 and np.isfinite(seconds)):
            return
        low, share = self._bin(batched)
        error = float(np.clip(np.log(seconds / predicted), -_LARGEST_STEP, _LARGEST_STEP))
        error /= share**2 + (1 - share) ** 2
        self._num_seen *= _STALENESS
        for index, weight in ((low, 1 - share), (low + 1, share)):
            gain = max(_MIN_GAIN, 1 / (1 + self._num_seen[index]))
            self._log_factors[index] += gain * weight * error
            self._num_seen[index] += weight
        self._log_factors += _RELAXATION * (self._log_factor(batched) - self._log_factors)

    def correction(self, batched: float) -> float:
        """The factor by which steps of this size have lately differed from the profile."""
        return float(np.exp(self._log_factor(batched)))

    def profiled(self, context: Any, batched: Any, width: Any = 1) -> Any:
        """`seconds` before any correction: never less for larger forwards."""
        attention = (self.alpha + self.beta * width) * context
        return attention + self._tokens_seconds(batched)

    def _tokens_seconds(self, batched: Any) -> Any:
        if not self.knots:
            return self.gamma * batched + self.delta
        (x0, x1), (y0, y1) = self.knots[-2:], self.curve[-2:]
        beyond = np.maximum(batched - x1, 0.0) * ((y1 - y0) / (x1 - x0))
        return np.interp(batched, self.knots, self.curve) + beyond

    def _bin(self, batched: Any) -> tuple[Any, Any]:
        """Between which two bins a size lies, and how far from the lower one."""
        if not np.ndim(batched):  # numpy is slow on single numbers
            place = min(max(math.log2(max(batched, 1)), 0.0), _NUM_BINS - 1.001)
            return int(place), place - int(place)
        places = np.clip(np.log2(np.maximum(batched, 1)), 0, _NUM_BINS - 1.001)
        low = np.floor(places).astype(np.int64)
        return low, places - low

    def _log_factor(self, batched: Any) -> Any:
        if not self._log_factors.any():
            return 0.0
        low, share = self._bin(batched)
        return self._log_factors[low] * (1 - share) + self._log_factors[low + 1] * share

    @classmethod
    def fit(cls, points: Sequence[CostPoint]) -> "CostModel":
        """
        Fits measured forwards by least squares of the relative error, all coefficients at least 0. The line is taken
        where its median error is at most 5 %, otherwise the curve.

        Raises:
            ValueError: for fewer than four points, or seconds that are not positive.
        """
        if len(points) < 4:
            raise ValueError(f"`points` must be at least 4 measurements, got {len(points)}.")
        context, batched, width, seconds = np.array(points, np.float64).T
        if not (seconds > 0).all():
            raise ValueError(f"`points` must have positive seconds, got {float(seconds.min())}.")
        attention = np.stack([context, context * width])
        constant = np.ones_like(batched)
        alpha, beta, gamma, delta = _fit_relative(np.stack([*attention, batched, constant]), seconds)
        line = cls(alpha, gamma, delta, beta)
        knots = np.unique(batched)
        if line.median_error(points) <= _BEND or len(knots) < 3:
            return line
        # The curve's value at its first knot and its rises, all at least 0: it cannot fall.
        rises = [np.clip((batched - low) / (high - low), 0, 1) for low, high in pairwise(knots)]
        alpha, beta, *steps = _fit_relative(np.stack([*attention, constant, *rises]), seconds)
        return cls(alpha, gamma, delta, beta, tuple(knots), tuple(np.cumsum(steps)))

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


def _fit_relative(features: np.ndarray, seconds: np.ndarray) -> list[float]:
    """Coefficients >= 0 of `features` (`[k, n]`) that minimise the squared relative error."""
    scaled = (features / seconds).T
    return nonnegative_least_squares(scaled, np.ones(len(seconds))).tolist()


@dataclass(frozen=True)
class DraftCost:
    """
    What drafting costs (SmartSpec, Eq. 4 and 5). An autoregressive drafter runs once per level of the deepest draft,
    with the rows that reach that level; any other source takes one call.

    Args:
        per_call, per_row (`float`): Seconds of one call (of one level), and of each row in it. 0 where unknown: what
            was measured at earlier steps takes their place.
        is_autoregressive (`bool`): Whether every level is a call.
        width (`int`): Nodes per level and row of the drafts.
        source (`str`): Whose probabilities they are: sources are calibrated apart.
        heeds_prices (`bool`): Whether the source ends drafts by itself where a further level, or node, costs more than
            it promises.
    """

    per_call: float = 0.0
    per_row: float = 0.0
    is_autoregressive: bool = False
    width: int = 1
    source: str = ""
    heeds_prices: bool = False

    @classmethod
    def of_model(cls, cost: CostModel, mean_context: float, width: int = 1, source: str = "") -> "DraftCost":
        """A draft model's, from its own profile (Eq. 5): T_fwd of one level as a call and a share of every row."""
        one, many = cost.seconds(mean_context, width, width), cost.seconds(8 * mean_context, 8 * width, width)
        per_row = max(float(many - one) / 7, 0.0)
        return cls(max(float(one) - per_row, 0.0), per_row, True, width, source)

    def calls(self, levels: np.ndarray) -> tuple[float, float]:
        """Calls, and rows in calls, of drafts that are `levels` deep (`[rows]` int; 0: not asked for)."""
        if self.is_autoregressive:
            return float(levels.max(initial=0)), float(levels.sum())
        return float(bool(levels.any())), float(np.count_nonzero(levels))


class DraftTimer:
    """
    Learns seconds per call and per row in a call from measured drafts: decayed least squares of the relative error,
    drawn to what the `DraftCost` says.

    Args:
        decay (`float`): Weight of all earlier drafts against the newest.
    """

    _SCALE = 0.05  # of a row's seconds to a call's: what cannot be told apart is split this way
    _TRUST = 1e-3  # in the prior

    def __init__(self, decay: float = 0.97):
        self._decay = decay
        # Sums over drafts of products and targets, x being calls and y scaled rows in calls, both by seconds.
        self._xx = self._xy = self._yy = self._x = self._y = 0.0

    def observe(self, calls: float, rows: float, seconds: float) -> None:
        """One step's drafting; `calls` and `rows` as `DraftCost.calls` counts them."""
        if calls <= 0 or not 1e-9 < seconds < 1e9:
            return
        x, y, decay = calls / seconds, self._SCALE * rows / seconds, self._decay
        self._xx, self._xy, self._yy = self._xx * decay + x * x, self._xy * decay + x * y, self._yy * decay + y * y
        self._x, self._y = self._x * decay + x, self._y * decay + y

    def seconds(self, cost: DraftCost) -> tuple[float, float]:
        """(seconds per call, seconds per row in a call)."""
        trust = self._TRUST * (self._xx + self._yy)
        if not trust:
            return cost.per_call, cost.per_row
        xx, yy, xy = self._xx + trust, self._yy + trust, self._xy
        x, y = self._x + trust * cost.per_call, self._y + trust * cost.per_row / self._SCALE
        determinant = xx * yy - xy * xy
        per_call, per_row = (yy * x - xy * y) / determinant, (xx * y - xy * x) / determinant
        if per_call < 0:  # one of them explains it all
            per_call, per_row = 0.0, y / yy
        elif per_row < 0:
            per_call, per_row = x / xx, 0.0
        return per_call, per_row * self._SCALE
