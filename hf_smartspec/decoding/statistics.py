"""The statistics that are reported everywhere under the same names, and the clock that fills them."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields

from transformers import PreTrainedModel

from ..target_model.model_state import state_of
from .trace import TracedRequest

PHASES = ("seconds_draft", "seconds_select", "seconds_forward", "seconds_verify", "seconds_observe")  # of a step


@dataclass
class GenerationStatistics:
    """
    Counters of one `generate` call or one request of an `Engine`, or sums over several.

    `steps` counts verification steps of single rows: a forward over a batch of eight running rows is eight steps and
    one of `forwards`. Times in seconds; `seconds_prefill` is what steps with prompts take until these are run. Those of
    a request are the seconds of the engine's steps from its first to its last, which it shares with other requests.
    """

    steps: int = 0
    forwards: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    generated_tokens: int = 0
    seconds_draft: float = 0.0
    seconds_select: float = 0.0
    seconds_forward: float = 0.0
    seconds_verify: float = 0.0
    seconds_observe: float = 0.0
    seconds_prefill: float = 0.0
    seconds_total: float = 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted tokens."""
        return self.accepted_tokens / max(self.drafted_tokens, 1)

    @property
    def mean_accepted_length(self) -> float:
        """Generated tokens per step of a row; 1 without speculation."""
        return self.generated_tokens / max(self.steps, 1)

    @property
    def goodput(self) -> float:
        """Generated tokens per second."""
        return self.generated_tokens / max(self.seconds_total, 1e-9)

    def __add__(self, other: "GenerationStatistics") -> "GenerationStatistics":
        sums = {item.name: getattr(self, item.name) + getattr(other, item.name) for item in fields(self)}
        return GenerationStatistics(**sums)

    def __sub__(self, other: "GenerationStatistics") -> "GenerationStatistics":
        return GenerationStatistics(
            **{item.name: getattr(self, item.name) - getattr(other, item.name) for item in fields(self)}
        )

    def as_dict(self) -> dict[str, float]:
        names = [item.name for item in fields(self)] + ["acceptance_rate", "mean_accepted_length", "goodput"]
        return {name: getattr(self, name) for name in names}


@dataclass
class ModelStatistics:
    """
    Statistics of speculation on a model: of the last call (`last`), and of all `num_calls` since it was enabled
    (`total`). `last_traces` has a `TracedRequest` for each row of the last call, if that drafted and was traced
    (`SmartSpecConfig(trace=True)`).
    """

    last: GenerationStatistics = field(default_factory=GenerationStatistics)
    total: GenerationStatistics = field(default_factory=GenerationStatistics)
    num_calls: int = 0
    last_traces: list[TracedRequest] | None = None


def record_call(
    model: PreTrainedModel, statistics: GenerationStatistics, traces: list[TracedRequest] | None = None
) -> None:
    """Add a call to `model.smartspec_statistics`."""
    with state_of(model).lock:
        known = vars(model).setdefault("smartspec_statistics", ModelStatistics())
        known.last, known.total = statistics, known.total + statistics
        known.num_calls, known.last_traces = known.num_calls + 1, traces


class Timed:
    """Adds the seconds spent in a `with` block to one of the statistics; `contextmanager` costs more."""

    __slots__ = ("clock", "name", "start", "statistics")

    def __init__(self, statistics: GenerationStatistics, name: str, clock: Callable[[], float]):
        self.statistics, self.name, self.clock = statistics, name, clock

    def __enter__(self) -> None:
        self.start = self.clock()

    def __exit__(self, *_: object) -> None:
        setattr(self.statistics, self.name, getattr(self.statistics, self.name) + self.clock() - self.start)
