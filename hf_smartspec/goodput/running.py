"""What the auction remembers of the latest steps."""

_DRIFT_DECAY = 0.96  # per step, of what tells that acceptance changes
_DRIFT_STRENGTH = 3.0  # of the assumption that it does not, in accepted nodes
_SPEEDUP_DECAY = 0.98  # per step, of what tells how much speculation gains
_SPEEDUP_STRENGTH = 10.0  # of the assumption that it gains nothing, in tokens
_MEMORY = 0.1  # weight of the newest step in the running benefit of drafting


class Drift:
    """How calibrated probabilities fare over the latest steps: quicker than the `Calibrator`, and coarser."""

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
    Tokens of the latest steps by what their time would have yielded plainly, at least 1. Goodput over many steps is
    highest if time has one price at all of them (Dinkelbach): steps whose drafts are poor leave it to the others.
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
    """A moving average that begins as a plain one."""

    def __init__(self) -> None:
        self.num, self.mean = 0, 0.0

    def add(self, value: float) -> None:
        self.num += 1
        self.mean += max(_MEMORY, 1 / self.num) * (value - self.mean)
