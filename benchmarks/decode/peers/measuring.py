"""
Measurements of peers: each of their ways on each group of prompts, in turns, and their tokens against `generate`'s.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from hf_smartspec.commands.common.console import track
from hf_smartspec.commands.common.models import left_padded

from ...kit.session import Case, Section, Session
from ...kit.tables import Column, Row, Rows
from .files import write_files
from .known import BASELINES, PEERS, cache_folder
from .processes import PeerError, PeerProcess
from .texts import Group, Prompts

_REFERENCE_ROWS = 8  # that are decoded together
Models = Callable[[str], tuple[PreTrainedModel, PreTrainedModel | None]]  # by dtype: target and draft model


class PeerBench:
    """
    Processes of peers, of one kind of weights at a time. Peers that cannot be had are named among the session's
    failures; the others go on.

    Args:
        args (`Namespace`): The command's arguments.
        session (`Session`): Keeps the results.
        load (callable): Returns target and draft model in a dtype.
        prompts (`Prompts`): All prompts.
    """

    def __init__(self, args: argparse.Namespace, session: Session, load: Models, prompts: Prompts):
        self.args, self.session, self.load = args, session, load
        groups = prompts.groups(args.texts or list(dict.fromkeys(prompts.texts)), args.batch_sizes, args.num_prompts)
        asked = sorted({number for group in groups for call in group.calls for number in call})
        place = {number: index for index, number in enumerate(asked)}  # peers get the prompts that they are asked
        self.prompts = [prompts.ids[number] for number in asked]
        self.groups = [item._replace(calls=[[place[row] for row in call] for call in item.calls]) for item in groups]
        self._stack, self._kind = ExitStack(), ""
        self._processes: dict[str, PeerProcess] = {}
        self._warm: set[tuple[str, str, str]] = set()

    def __enter__(self) -> "PeerBench":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def sections(self) -> list[Section]:
        return [
            Section(
                f"{kind}, {group.text}, batch {group.batch_size}", partial(self._cases, kind, group), _COLUMNS,
                first="engine, decoding", turns=self.args.repeats, summary=_summary,
            )
            for kind in self.args.kinds for group in self.groups
        ]  # fmt: skip

    def _cases(self, kind: str, group: Group) -> Iterator[Case]:
        if self._kind != kind:
            self._start(kind)
        for peer, process in self._processes.items():
            for way, in_batches in process.ways.items():
                if in_batches or group.batch_size == 1:
                    yield Case(f"{peer}, {way}", partial(self._measured, peer, way, group))

    def _measured(self, peer: str, way: str, group: Group) -> Row:
        if (key := (peer, way, str(group))) not in self._warm:
            self._decode(peer, way, group)
            self._warm.add(key)
        seconds, tokens = self._decode(peer, way, group)
        expected = [self._reference[number] for call in group.calls for number in call]
        return {"seconds": seconds} | compared(tokens, expected)

    def _decode(self, peer: str, way: str, group: Group) -> tuple[float, list[list[int]]]:
        """Return the seconds and the tokens of all calls."""
        answers = [self._processes[peer].decode(way, call) for call in group.calls]
        tokens = [row for answer in answers for row in answer.tokens]
        if (lengths := {len(row) for row in tokens}) != {self.args.max_new_tokens}:
            raise PeerError(f"decoded {sorted(lengths)} tokens in place of {self.args.max_new_tokens}")
        return sum(answer.seconds for answer in answers), tokens

    @cached_property
    def _pythons(self) -> dict[str, Path]:
        """Interpreters of the peers that can be had here."""
        found, given = {}, dict(self.args.python)
        for name in track(self.args.peers, desc="making environments"):
            with self._failing(name):
                if "gguf" in PEERS[name].files and find_spec("gguf") is None:
                    raise PeerError('its file is written by gguf: pip install "hf-smartspec[gguf]"')
                folder = (self.args.cache or cache_folder()).absolute()
                found[name] = given.get(name) or PEERS[name].python(name, folder)
        return found

    @cached_property
    @torch.no_grad()
    def _reference(self) -> list[list[int]]:
        """New tokens of every prompt by `generate` in float32, without an end of sequence."""
        model, _ = self.load("float32")
        model.generation_config = GenerationConfig(pad_token_id=0)
        found = []
        for first in track(range(0, len(self.prompts), _REFERENCE_ROWS), desc="the tokens to compare with"):
            inputs = left_padded(self.prompts[first : first + _REFERENCE_ROWS], 0, model.device)
            output: Any = model.generate(**inputs, max_new_tokens=self.args.max_new_tokens, do_sample=False)
            found += output[:, inputs["input_ids"].shape[1] :].tolist()
        return found

    def _start(self, kind: str) -> None:
        """Start all peers that run this kind of weights, in place of those of the kind before."""
        self._stack.close()
        self._kind, self._processes = kind, {}
        self._warm.clear()
        models = self.load({"int8": "bfloat16", "int4": "float32"}.get(kind, kind))
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="smartspec-peers-")))
        peers = {name: PEERS[name] for name in self._pythons if kind in PEERS[name].kinds}
        files = {file for peer in peers.values() for file in peer.files}
        job = {
            "prompts": self.prompts,
            "num_tokens": self.args.max_new_tokens,
            "threads": self.args.threads,
            "kind": kind,
            "heads": self.args.heads,
            "files": write_files(*models, files, kind, folder / "files"),
        }
        for name, peer in track(list(peers.items()), desc=f"{kind}: loading"):
            with self._failing(f"{kind}: {name}"):
                module, own = f"runners.{peer.runner}", job | {"settings": peer.settings}
                process = PeerProcess(self._pythons[name], module, own, folder / name, self.args.timeout)
                self._stack.callback(process.close)
                self._processes[name] = process
                self.session.report["peers"][name] = process.about

    @contextmanager
    def _failing(self, name: str) -> Iterator[None]:
        """Name a failure in the block among those of the session."""
        failures = self.session.report["failures"]
        failures.pop(name, None)
        try:
            yield
        except (PeerError, OSError) as error:
            failures[name] = str(error)


def compared(tokens: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> Row:
    """
    Return how many tokens are the expected ones up to the first difference of each row. In half precision and in int8,
    engines round differently, so that they differ from the first near-tie on.
    """
    same = list(map(agreeing, tokens, expected))
    return {
        "num_rows": len(tokens),
        "num_tokens": sum(map(len, tokens)),
        "num_same_rows": sum(count == len(row) for count, row in zip(same, tokens)),
        "num_same_tokens": sum(same),
    }


def agreeing(tokens: Sequence[int], expected: Sequence[int]) -> int:
    """Return the number of tokens up to the first difference."""
    return next((index for index, (a, b) in enumerate(zip(tokens, expected)) if a != b), len(tokens))


def _summary(runs: Sequence[Row]) -> Row:
    seconds = median(run["seconds"] for run in runs)
    return dict(runs[-1]) | {"seconds": seconds, "tokens_per_second": runs[-1]["num_tokens"] / seconds}


def ratio(row: Row, rows: Rows) -> float | None:
    """Return plain `generate`'s seconds by the row's, the median over turns; None where it was not measured."""
    base = next((rows[name] for name in BASELINES if name in rows), None)
    if base is None:
        return None
    plain, own = (item.get("runs", [item]) for item in (base, row))
    return median(before["seconds"] / after["seconds"] for before, after in zip(plain, own))


_COLUMNS = (
    Column("tokens/s", "tokens_per_second", "{:.1f}"),
    Column("x plain", ratio, "{:.2f}"),
    Column("tokens as float32", lambda row, _: row["num_same_tokens"] / row["num_tokens"], "{:.0%}"),
    Column("rows", lambda row, _: f"{row['num_same_rows']} of {row['num_rows']}"),
)
