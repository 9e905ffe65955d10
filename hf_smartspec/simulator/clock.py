"""Virtual time."""


class EventClock:
    """Virtual clock in seconds, which only `advance` and `jump` move. A call returns the time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def jump(self, time: float) -> None:
        """Move to `time`, unless that has passed."""
        self.now = max(self.now, time)
