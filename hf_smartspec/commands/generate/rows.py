"""Rows of a dataset: a file, a folder written by `save_to_disk`, or a dataset of the hub."""

import argparse
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..common.arguments import UsageError

_LOADERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".txt": "text"}
_PACKED = (".gz", ".bz2", ".xz", ".zst")
_OWN = ("row", "finish_reason", "generated_tokens", "error")  # written in addition to columns and answer


def checked_rows(args: argparse.Namespace) -> Any:
    """Return the rows of `--dataset` and its options; raises `UsageError` if the dataset or a column does not exist."""
    rows = load_rows(args.dataset, args.config, args.split)
    check_columns(rows, "--column", [args.column])
    check_columns(rows, "--keep", args.keep or [])
    for name in (*_OWN, args.response):
        if name in (args.keep or [args.column]):
            raise UsageError(f"--keep: this command writes {name!r} itself; --response names its answers")
    return rows.select(range(min(args.limit, len(rows)))) if args.limit else rows


def kept_columns(args: argparse.Namespace) -> list[str]:
    """Return the columns that are written with the answers."""
    return list(dict.fromkeys(args.keep or [args.column]))


def load_rows(source: str, name: str | None, split: str) -> Any:
    """
    Return a `datasets.Dataset`.

    Args:
        source (`str`): A file, a folder, or a hub id.
        name (`str`, *optional*): Name of a configuration, for datasets of the hub that have several.
        split (`str`): A split of `datasets`, such as "train" or "test[:100]"; files have "train" only.

    Raises:
        UsageError: if it cannot be loaded, or has no rows.
    """
    try:
        import datasets  # type: ignore[import-untyped]
    except ImportError as error:
        raise UsageError('datasets is missing: pip install "hf-smartspec[data]"') from error
    datasets.disable_progress_bars()
    path = Path(source)
    try:
        if path.is_file():
            if not path.stat().st_size:
                raise UsageError(f"--dataset: {source!r} has no rows")
            rows = datasets.load_dataset(**_loader(path), split=split)
        elif (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            rows = datasets.load_from_disk(source)
            rows = rows[split] if isinstance(rows, datasets.DatasetDict) else rows
        elif path.is_absolute() or source.startswith(".") or path.suffix in (*_LOADERS, *_PACKED):
            raise UsageError(f"--dataset: no such file: {source!r}")
        else:
            rows = datasets.load_dataset(source, name, split=split)
    except UsageError:
        raise
    except Exception as error:  # of many kinds; all mean that it cannot be loaded
        raise UsageError(f"--dataset: cannot load {source!r}: {_reason(error)}") from error
    if not len(rows):
        raise UsageError(f"--dataset: {source!r} has no rows")
    return rows


def check_columns(rows: Any, option: str, names: list[str]) -> None:
    """Raise `UsageError` for columns that do not exist."""
    for name in names:
        if name not in rows.column_names:
            near = difflib.get_close_matches(name, rows.column_names, n=1)
            meant = f", did you mean {near[0]!r}?" if near else f"; there are {', '.join(rows.column_names)}"
            raise UsageError(f"{option}: no column {name!r}{meant}")


def _loader(path: Path) -> dict[str, Any]:
    suffix = path.with_suffix("").suffix if path.suffix in _PACKED else path.suffix
    if suffix not in _LOADERS:
        raise UsageError(f"--dataset: {str(path)!r} is none of {', '.join(_LOADERS)}")
    return {"path": _LOADERS[suffix], "data_files": str(path)} | ({"sep": "\t"} if suffix == ".tsv" else {})


def _reason(error: Exception) -> str:
    """Return the first line of an error's cause, which `datasets` wraps."""
    cause = error.__cause__ or error
    lines = str(cause).strip().splitlines() or str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


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
