"""Forwards that are recorded on the device and replayed, with one launch in place of hundreds."""

from .recordings import RUNS_UNTIL_RECORDED, ForwardRecordings, recordings_for, records

__all__ = ["RUNS_UNTIL_RECORDED", "ForwardRecordings", "recordings_for", "records"]
