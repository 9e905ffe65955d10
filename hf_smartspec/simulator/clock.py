"""Virtual time."""


class EventClock:
    """Seconds that pass only where something is said to take them; called, it tells the time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def jump(self, time: float) -> None:
        """Nothing happens until `time`; it may have passed already."""
        self.now = max(self.now, time)
