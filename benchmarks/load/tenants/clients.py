"""
Tenants of a server: clients that ask short questions one after the other, and one that asks for all of its capacity.
"""

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from hf_smartspec.commands.common.models import read_prompts

from .server import TenantServer

_PATH = "/v1/completions"
_NUM_PROMPTS, _NUM_STREAMS, _NUM_CHOICES, _NUM_TOP = 1024, 20, 4, 5  # of an attack
_SECONDS_QUIET, _MOST_SECONDS = 1.0, 60.0  # in which nothing more of an attack comes in, and up to then
_PROMPTS = ("def add_{}(a, b):", "The capital of country {} is", "SELECT name FROM t{} WHERE", "1, 2, 3, {},")


class Asked(NamedTuple):
    """Latency of each of a tenant's answers, in seconds, and their texts."""

    seconds: list[float]
    texts: list[str]


def _client(server: TenantServer, tenant: int) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {server.keys[tenant]}"}
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=server.url, headers=headers, timeout=None, limits=limits)


async def ask_all(server: TenantServer, args: argparse.Namespace, num_requests: int) -> list[Asked]:
    """Return the answers to all tenants but the last one, the attacker; each asks one question after the other."""
    return await asyncio.gather(*(_ask(server, args, tenant, num_requests) for tenant in range(args.tenants - 1)))


async def _ask(server: TenantServer, args: argparse.Namespace, tenant: int, num_requests: int) -> Asked:
    asked = Asked([], [])
    async with _client(server, tenant) as client:
        await client.get("/health")  # connects
        for number in range(num_requests):
            prompt = _prompt(args.prompts, 1000 * tenant + number)
            body = {"prompt": prompt, "max_tokens": args.max_new_tokens, "ignore_eos": True, "temperature": 0}
            start = time.perf_counter()
            answer = await client.post(_PATH, json=body)
            answer.raise_for_status()
            asked.seconds.append(time.perf_counter() - start)
            asked.texts.append(answer.json()["choices"][0]["text"])
    return asked


def _prompt(file: Path | None, number: int) -> str:
    """Return a short prompt that no other request has; with a file, its prompts in turn."""
    if file is None:
        return _PROMPTS[number % len(_PROMPTS)].format(number)
    texts = _read(file)
    return texts[number % len(texts)]


@cache
def _read(file: Path) -> list[str]:
    return [row["prompt"] for row in read_prompts(file)]


@asynccontextmanager
async def attacked(server: TenantServer, args: argparse.Namespace) -> Any:
    """
    Send the attacker's requests, which run and wait as far as the server admits them. Yield a count of its requests by
    status, which grows as they are answered.
    """
    statuses: Counter[int] = Counter()
    async with _client(server, args.tenants - 1) as client:
        tasks = [asyncio.create_task(_send(client, body, statuses)) for body in _bodies(args)]
        try:
            await _until_it_is_in(client, tasks)
            yield statuses
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _bodies(args: argparse.Namespace) -> list[dict[str, Any]]:
    usual = {"max_tokens": args.attack_tokens, "ignore_eos": True}
    bodies: list[dict[str, Any]] = []
    if "prompts" in args.attack:
        bodies.append(usual | {"prompt": ["a"] * _NUM_PROMPTS})
    if "streams" in args.attack:
        stream = usual | {"prompt": "a", "n": _NUM_CHOICES, "logprobs": _NUM_TOP, "stream": True}
        bodies += [stream] * _NUM_STREAMS
    return bodies


async def _send(client: httpx.AsyncClient, body: dict[str, Any], statuses: Counter[int]) -> None:
    async with client.stream("POST", _PATH, json=body) as answer:
        statuses[answer.status_code] += 1
        async for _ in answer.aiter_bytes():
            pass


async def _until_it_is_in(client: httpx.AsyncClient, tasks: Sequence[asyncio.Task]) -> None:
    deadline, load, grown = time.monotonic() + _MOST_SECONDS, -1, time.monotonic()
    while time.monotonic() < min(deadline, grown + _SECONDS_QUIET) and not all(task.done() for task in tasks):
        now = (await client.get("/load")).json()["server_load"]
        if now > load:
            load, grown = now, time.monotonic()
        await asyncio.sleep(0.05)
