"""Lengths of the pieces of prompts that rows are fed in a step."""

from collections.abc import Hashable, Mapping

import numpy as np

from .call import Request


def shorten_prompts(feeds: dict[Request, np.ndarray], prompts: list[Request], room: int) -> None:
    """
    Cut prompts to `room` tokens in all: equal parts for namespaces, where those that need less leave the rest to
    the others. Within a namespace, earlier prompts come first.
    """
    wants: dict[Hashable, int] = {}
    for request in prompts:
        wants[request.call.namespace] = wants.get(request.call.namespace, 0) + len(feeds[request])
    rooms = equal_parts(room, wants)
    for request in prompts:
        namespace = request.call.namespace
        if not request.cache_row.in_one_piece:
            feeds[request] = feeds[request][: max(rooms[namespace], 0)]
        rooms[namespace] -= len(feeds[request])
        if not len(feeds[request]):
            del feeds[request]


def equal_parts(total: int, wants: Mapping[Hashable, int]) -> dict[Hashable, int]:
    """Divide a number into equal parts, none larger than wanted; what one does not want goes to the others."""
    parts = {}
    for num_others, name in zip(range(len(wants) - 1, -1, -1), sorted(wants, key=wants.__getitem__)):
        parts[name] = min(wants[name], -(-total // (num_others + 1)))
        total -= parts[name]
    return parts
