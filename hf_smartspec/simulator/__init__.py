"""Simulation of an engine under load in virtual time: real loop, scheduler, sources and policies, without a model."""

from .arrivals import Trace, alternating, gamma, poisson, read_trace
from .clock import EventClock
from .costs import Device, datasheet_cost
from .engine import SimulatedEngine
from .fleet import FleetResult, SimulatedFleet
from .requests import LoadRequest, with_acceptance
from .results import LoadResult, Served
from .sources import TableCandidates, tree_size

__all__ = [
    "Device",
    "EventClock",
    "FleetResult",
    "LoadRequest",
    "LoadResult",
    "Served",
    "SimulatedEngine",
    "SimulatedFleet",
    "TableCandidates",
    "Trace",
    "alternating",
    "datasheet_cost",
    "gamma",
    "poisson",
    "read_trace",
    "tree_size",
    "with_acceptance",
]
