"""
A load of streaming clients; by hand, for a server that runs: `python -m tests.serving.server.load URL 500 PID` prints
how many were answered, and what memory the process with that id takes.
"""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx


@dataclass
class LoadReport:
    """Prompts with the texts of answers that came to their end, and how many clients left or had none."""

    texts: list[tuple[str, str]] = field(default_factory=list)
    num_left: int = 0
    num_failed: int = 0
    errors: list[str] = field(default_factory=list)


async def run_load(url: str, prompts: Sequence[str], max_tokens: int, leave_every: int = 0) -> LoadReport:
    """Send all requests at once. Every `leave_every`th client leaves after the first piece of its answer."""
    report = LoadReport()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:

        async def ask(number: int, prompt: str) -> None:
            leaves = leave_every > 0 and number % leave_every == leave_every - 1
            try:
                text = await _read(client, prompt, max_tokens, leaves)
            except Exception as error:
                report.num_failed += 1
                report.errors.append(repr(error))
                return
            if text is None:
                report.num_left += 1
            else:
                report.texts.append((prompt, text))

        await asyncio.gather(*(ask(number, prompt) for number, prompt in enumerate(prompts)))
    return report


async def _read(client: httpx.AsyncClient, prompt: str, max_tokens: int, leaves: bool) -> str | None:
    body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True}
    text, is_done = "", False
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if leaves:
                return None
            if line == "data: [DONE]":
                is_done = True
            elif line:
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise RuntimeError(chunk["error"]["message"])
                text += chunk["choices"][0]["text"]
    if not is_done:
        raise RuntimeError("the stream broke off")
    return text


def _memory(pid: str) -> float:
    """MiB that a process has resident."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def main() -> None:
    url, count, *process = sys.argv[1:]
    prompts = [f"def function_{number}(a, b):" for number in range(int(count))]
    for turn in range(3):
        start = time.perf_counter()
        report = asyncio.run(run_load(url, prompts, max_tokens=32, leave_every=10))
        seconds = time.perf_counter() - start
        memory = f", {_memory(process[0]):.0f} MiB" if process else ""
        print(f"{turn}: {len(report.texts)} answered, {report.num_left} left, {report.num_failed} failed, "
              f"{seconds:.1f} s{memory}", *report.errors[:3])  # fmt: skip


if __name__ == "__main__":
    main()
