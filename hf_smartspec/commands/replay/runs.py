"""Replay of data sets with several sources, side by side."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from ..common.progress import track
from ..common.recordings import Recording
from .loop import Replayer, Tally, warm_up
from .sources import SourceSpec

Results = dict[str, dict[SourceSpec, Tally]]  # by data set and source


class DataSet(NamedTuple):
    """The requests of one file."""

    name: str
    recordings: list[Recording]


def replay(
    data: Sequence[DataSet],
    specs: Sequence[SourceSpec],
    results: Results,
    limit: int | None = None,
    batch_size: int = 1,
    num_nodes: int | None = None,
    carries_over: bool = False,
) -> None:
    """
    Replay every data set with every source and fill in `results`. Sources take turns, request by request, so that
    changes of the machine's load meet all alike.

    Args:
        limit (`int`, *optional*): Requests per data set, at most.
        batch_size (`int`): Requests that run at once.
        num_nodes (`int`, *optional*): Draft nodes per request and step, for sources whose specification has no number.
        carries_over (`bool`): Whether sources keep what they learnt from one data set to the next.
    """
    replayers: dict[SourceSpec, Replayer] = {}
    total = sum(len(item.recordings[:limit]) for item in data) * len(specs)
    with track(total=total, desc="replaying") as progress:
        for name, recordings in data:
            recordings = recordings[:limit]
            if not replayers or not carries_over:
                replayers = {spec: _replayer(spec, recordings[0], batch_size, num_nodes) for spec in specs}
            tallies = {spec: Tally.of(len(recordings)) for spec in specs}
            results[name] = tallies
            runs = [replayer.run(recordings, tallies[spec]) for spec, replayer in replayers.items()]
            try:
                for _ in zip_longest(*runs):
                    progress.update(len(runs))
            finally:
                for item in runs:
                    item.close()


def _replayer(spec: SourceSpec, recording: Recording, batch_size: int, num_nodes: int | None) -> Replayer:
    source = spec.build()
    warm_up(source, spec.build, recording)
    return Replayer(source, num_nodes if spec.num_nodes is None else spec.num_nodes, batch_size)
