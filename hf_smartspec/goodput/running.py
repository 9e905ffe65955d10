"""Running means of the auction over the latest steps."""

_DRIFT_DECAY = 0.96  # decay per step of expected and observed acceptance
_DRIFT_STRENGTH = 3.0  # weight of the prior that they are equal, in accepted nodes
_SPEEDUP_DECAY = 0.98  # decay per step of the tokens that the speed-up is the ratio of
_SPEEDUP_STRENGTH = 10.0  # weight of the prior that there is no speed-up, in tokens
_MEMORY = 0.1  # weight of the newest step in the running benefit of drafting


class Drift:
    """Ratio of observed to expected acceptance over the latest steps: quicker and coarser than the `Calibrator`."""

    def __init__(self) -> None:
        self._expected = self._observed = 0.0

    def add(self, expected: float, observed: float) -> None:
        self._expected = self._expected * _DRIFT_DECAY + expected
        self._observed = self._observed * _DRIFT_DECAY + observed

    @property
    def ratio(self) -> float:
        return (self._observed + _DRIFT_STRENGTH) / (self._expected + _DRIFT_STRENGTH)


class Speedup:
    """
    Ratio of the tokens of the latest steps to those of plain decoding in the same time, at least 1. Goodput over many
    steps is highest if time has one price in all of them (Dinkelbach): steps with poor drafts leave it to the others.
    """

    def __init__(self) -> None:
        self._tokens = self._plain_tokens = _SPEEDUP_STRENGTH

    def add(self, tokens: float, plain_tokens: float) -> None:
        self._tokens = self._tokens * _SPEEDUP_DECAY + tokens
        self._plain_tokens = self._plain_tokens * _SPEEDUP_DECAY + plain_tokens

    @property
    def ratio(self) -> float:
        return max(self._tokens / self._plain_tokens, 1.0)


class Running:
    """A moving average that starts as a plain average."""

    def __init__(self) -> None:
        self.num, self.mean = 0, 0.0

    def add(self, value: float) -> None:
        self.num += 1
        self.mean += max(_MEMORY, 1 / self.num) * (value - self.mean)
