"""The part of a dataset that one process answers."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# Environment variables of torchrun, Intel's MPI, Open MPI and MVAPICH2, which accelerate reads too.
_RANK = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
_WORLD_SIZE = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_LOCAL_RANK = ("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK")


@dataclass(frozen=True)
class Shard:
    """Part `index` of `num`, from 0."""

    index: int
    num: int

    @staticmethod
    def of(text: str) -> "Shard":
        """Return the shard "I/N" of a command line."""
        index, _, num = text.partition("/")
        if not (index.isdecimal() and num.isdecimal() and int(index) < int(num)):
            raise argparse.ArgumentTypeError(f"must be I/N with I from 0 to N - 1, got {text!r}")
        return Shard(int(index), int(num))

    def named(self, path: Path) -> Path:
        """Return the path of this part: `out-00000-of-00002.jsonl` for `out.jsonl`, as datasets name their parts."""
        if self.num == 1:
            return path
        return path.with_name(f"{path.stem}-{self.index:05}-of-{self.num:05}{path.suffix}")

    def range(self, num_rows: int) -> range:
        """Return the rows of this part, which are contiguous; sizes of parts differ by one row at most."""
        return range(self.index * num_rows // self.num, (self.index + 1) * num_rows // self.num)


def launched_shard(environ: Mapping[str, str]) -> Shard:
    """Return this process's part, where `accelerate launch`, torchrun or MPI has started several; else the whole."""
    index, num = _number(environ, _RANK), _number(environ, _WORLD_SIZE)
    return Shard(0, 1) if index is None or num is None else Shard(index, num)


def launched_device(device: str, environ: Mapping[str, str]) -> str:
    """Return the device of this process: each process of a machine gets its own GPU."""
    index = _number(environ, _LOCAL_RANK)
    return f"cuda:{index}" if device == "cuda" and index is not None else device


def _number(environ: Mapping[str, str], names: Sequence[str]) -> int | None:
    return next((int(environ[name]) for name in names if environ.get(name, "").isdecimal()), None)
