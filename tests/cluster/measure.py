"""
Routing, and replicas that begin, on real engines of the embedded target; by hand, on a quiet machine:

    python -m tests.cluster.measure FILE.jsonl.gz [FILE ...]

prints tokens per step of a request, and the share of prompt tokens that were not computed again, for two replicas by
each router; and the tokens per step of a replica that begins with what another one has shared, beside those of that
one, over the same requests.
"""

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from hf_smartspec.commands.common.recordings import Fields, read_requests

REPOSITORY = Path(__file__).parents[2]
TENANTS, REQUESTS, AT_ONCE, MAX_TOKENS = 6, 180, 6, 48
ROUTERS = ("power_of_two", "affinity")


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


def requests_of(paths: Sequence[str]) -> list[tuple[int, str]]:
    """Tenants and their prompts: each tenant has texts of one file, behind instructions of its own."""
    texts = [["\n".join(item.context) for item in read_requests(Path(path), Fields(), 100)] for path in paths]
    found = []
    for number in range(REQUESTS):
        tenant = (7 * number + number // TENANTS) % TENANTS
        own = texts[tenant % len(texts)]
        instructions = f"Instructions of customer {tenant}.\n" + "\n".join(own[-1 - tenant - k][:200] for k in range(3))
        found.append((tenant, f"{instructions}\n\n{own[number % 60][:400]}\n"))
    return found


async def ask(url: str, requests: Sequence[tuple[int, str]]) -> None:
    """A few at a time, in their order."""
    places = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:

        async def one(tenant: int, prompt: str) -> None:
            async with places:
                body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
                answer = await client.post("/v1/completions", json=body, headers=_key(tenant))
                answer.raise_for_status()

        await asyncio.gather(*(one(*request) for request in requests))


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


def by_router(requests: Sequence[tuple[int, str]], keys: Path) -> None:
    found = {}
    for router in ROUTERS:
        options = ["--replicas", "2", "--router", router, "--assistant", "suffix", "--api-key-file", str(keys)]
        with served(*options) as url:
            start = time.perf_counter()
            asyncio.run(ask(url, requests))
            found[router] = rates({}, counted(url))
            per_step, reused = found[router]
            seconds = time.perf_counter() - start
            print(f"{router:13} {per_step:.3f} tokens/step, {100 * reused:.1f} % reused, {seconds:.1f} s", flush=True)
    one, other = (found[router] for router in ROUTERS)
    print(f"affinity / power of two: {other[0] / one[0]:.3f} x tokens/step, {other[1] / one[1]:.3f} x reused")


def fresh(requests: Sequence[tuple[int, str]], keys: Path) -> None:
    half = len(requests) // 2
    with tempfile.TemporaryDirectory() as folder:
        options = ["--assistant", "suffix", "--api-key-file", str(keys), "--shared", folder, "--shared-interval"]
        with served(*options, "1") as old:
            asyncio.run(ask(old, requests[:half]))
            time.sleep(5)  # by then, all of it is in the folder
            with served(*options, "3600") as new:
                before = [counted(url) for url in (old, new)]
                for url in (old, new):
                    asyncio.run(ask(url, requests[half:]))
                first, second = (rates(item, counted(url))[0] for item, url in zip(before, (old, new)))
    print(f"old replica {first:.3f} tokens/step, fresh one {second:.3f}: {second / first:.3f} x")


def main() -> int:
    requests = requests_of(sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text("".join(f"key-{tenant}\n" for tenant in range(TENANTS)))
        fresh(requests, keys)
        by_router(requests, keys)
    return 0


if __name__ == "__main__":
    sys.exit(main())
