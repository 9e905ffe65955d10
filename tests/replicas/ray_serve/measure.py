"""
Routing, and replicas that begin, on real engines of the embedded target; by hand, on a quiet machine:

    python -m tests.replicas.ray_serve.measure --fresh FILE.jsonl.gz [FILE ...]

prints tokens per step of a request, and the share of prompt tokens that were not computed again, by each router; and
the tokens per step of a replica that begins with what another one has shared, beside those of that one, over the same
requests. The texts are recorded conversations; what the target answers to each of their turns is its own.
"""

import argparse
import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import httpx
from prometheus_client.parser import text_string_to_metric_families

from hf_smartspec.commands.common.recordings import Fields, read_requests

REPOSITORY = Path(__file__).parents[3]
TENANTS, SESSIONS, AT_ONCE, MAX_TOKENS, NUM_NODES, MAX_CHARACTERS = 12, 120, 6, 48, 8, 3000
ROUTERS = ("power_of_two", "affinity")


class Session(NamedTuple):
    tenant: int
    prompts: list[str]  # each with all that was said before


@contextmanager
def served(*options: str) -> Iterator[str]:
    """The address of a server, which has ended behind the context."""
    arguments = ["demo=demos/models/target", "--dtype", "float32", "--threads", "1", "--port", "0", *options]
    process = subprocess.Popen(
        [sys.executable, "-m", "hf_smartspec.commands.main", "serve", *arguments],
        cwd=REPOSITORY, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    try:
        yield next(match[1] for line in process.stderr if (match := re.search(r"at (http://\S+)/v1", line)))
    finally:
        process.terminate()
        process.wait(120)


def sessions_of(paths: Sequence[str], num_tasks: int = 1000) -> list[Session]:
    """
    Conversations of the files in their order, one of each file in turn: those that are about the first tasks, which may
    be tried again and again, or asked about with the same schema. A task is one tenant's.
    """
    found = [_sessions(Path(path), num_tasks) for path in paths]
    return [session for several in zip_longest(*found) for session in several if session][:SESSIONS]


def _sessions(path: Path, num_tasks: int) -> list[Session]:
    found: dict[str, list[tuple[int, Session]]] = {}  # by how the task begins
    before: list[str] = []
    for number, (context, _) in enumerate(read_requests(path, Fields(), None)):
        task = context[0][:200]
        if sum(map(len, context)) > MAX_CHARACTERS or (task not in found and len(found) == num_tasks):
            continue
        own = found.setdefault(task, [])
        if not own or not before or context[: len(before)] != before:
            own.append((number, Session(zlib.crc32(task.encode()) % TENANTS, [])))
        own[-1][1].prompts.append("\n".join(context) + "\n")
        before = context
    ordered = sorted((item for own in found.values() for item in own), key=lambda item: item[0])
    return [session for _, session in ordered]


async def ask(url: str, sessions: Sequence[Session]) -> None:
    """Some sessions at a time, in their order; within one, each turn after the answer before it."""
    places = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:

        async def hold(session: Session) -> None:
            async with places:
                for prompt in session.prompts:
                    body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
                    body |= {"speculation": {"num_nodes": NUM_NODES}}  # at most
                    answer = await client.post("/v1/completions", json=body, headers=_key(session.tenant))
                    answer.raise_for_status()

        await asyncio.gather(*map(hold, sessions))


def _key(tenant: int) -> dict[str, str]:
    return {"Authorization": f"Bearer key-{tenant}"}


def counted(url: str) -> dict[str, float]:
    """Counters, summed over replicas."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics", headers=_key(0), timeout=60).text):
        for sample in family.samples:
            if sample.name.endswith("_total"):
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def rates(before: dict[str, float], after: dict[str, float]) -> tuple[float, float]:
    """Tokens per step of a request, and the share of prompt tokens that were there."""

    def grown(name: str) -> float:
        return after[f"vllm:{name}_total"] - before.get(f"vllm:{name}_total", 0.0)

    steps, queries = grown("spec_decode_num_drafts"), grown("prefix_cache_queries")
    return grown("generation_tokens") / steps, grown("prefix_cache_hits") / queries


def by_router(num_replicas: int, sessions: Sequence[Session], keys: Path) -> None:
    found = {}
    for router in ROUTERS:
        options = ["--assistant", "suffix", "--admin-key-file", str(keys), "--router", router]
        with served("--replicas", str(num_replicas), *options) as url:
            start = time.perf_counter()
            asyncio.run(ask(url, sessions))
            found[router] = rates({}, counted(url))
            per_step, reused = found[router]
            seconds = time.perf_counter() - start
            print(f"{router:13} {per_step:.3f} tokens/step, {100 * reused:.1f} % reused, {seconds:.1f} s", flush=True)
    one, other = (found[router] for router in ROUTERS)
    print(f"affinity / power of two: {other[0] / one[0]:.3f} x tokens/step, {other[1] / one[1]:.3f} x reused")


def fresh(sessions: Sequence[Session], keys: Path) -> None:
    half = len(sessions) // 2
    with tempfile.TemporaryDirectory() as folder:
        options = ["--assistant", "suffix", "--admin-key-file", str(keys), "--shared", folder, "--shared-interval"]
        with served(*options, "1") as old:
            asyncio.run(ask(old, sessions[:half]))
            time.sleep(5)  # by then, all of it is in the folder
            with served(*options, "3600") as new:
                before = [counted(url) for url in (old, new)]
                for url in (old, new):
                    asyncio.run(ask(url, sessions[half:]))
                first, second = (rates(item, counted(url))[0] for item, url in zip(before, (old, new)))
    print(f"old replica {first:.3f} tokens/step, fresh one {second:.3f}: {second / first:.3f} x")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--replicas", type=int, default=2, metavar="N", help="behind each router; 0: no routing")
    parser.add_argument(
        "--tasks", type=int, default=1000, metavar="N", help="the first of each file; of few, each comes again"
    )
    parser.add_argument("--fresh", action="store_true", help="also a replica that begins")
    args = parser.parse_args()
    sessions = sessions_of(args.files, args.tasks)
    num, tenants = sum(len(session.prompts) for session in sessions), {item.tenant for item in sessions}
    print(f"{num} requests in {len(sessions)} sessions of {len(tenants)} tenants", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text("".join(f"key-{tenant}\n" for tenant in range(TENANTS)))
        if args.fresh:
            fresh(sessions, keys)
        if args.replicas:
            by_router(args.replicas, sessions, keys)
    return 0


if __name__ == "__main__":
    sys.exit(main())
