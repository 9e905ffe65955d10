"""Simulation of an engine under load in virtual time: real loop, scheduler, sources and policies, without a model."""

from .arrivals import gamma, poisson
from .clock import EventClock
from .engine import SimulatedEngine
from .requests import LoadRequest
from .results import LoadResult, Served
from .sources import TableCandidates, tree_size

__all__ = [
    "EventClock",
    "LoadRequest",
    "LoadResult",
    "Served",
    "SimulatedEngine",
    "TableCandidates",
    "gamma",
    "poisson",
    "tree_size",
]
