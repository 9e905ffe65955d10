"""Rows of a dataset: a file, a folder that `save_to_disk` has written, or one of the hub."""

import argparse
import difflib
from pathlib import Path
from typing import Any

from ..common.arguments import UsageError

_LOADERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".txt": "text"}
_PACKED = (".gz", ".bz2", ".xz", ".zst")


# What is written beside columns and answer.
OWN = ("row", "finish_reason", "generated_tokens", "error")


def checked_rows(args: argparse.Namespace) -> Any:
    """
    The rows that `--dataset` and its like name, with all columns that are asked for.

    Raises:
        UsageError: for what is not there.
    """
    rows = load_rows(args.dataset, args.config, args.split)
    check_columns(rows, "--column", [args.column])
    check_columns(rows, "--keep", args.keep or [])
    for name in (*OWN, args.response):
        if name in (args.keep or [args.column]):
            raise UsageError(f"--keep: {name!r} is what this command writes itself; --response names its answers")
    return rows.select(range(min(args.limit, len(rows)))) if args.limit else rows


def kept_columns(args: argparse.Namespace) -> list[str]:
    """That are written beside the answers."""
    return list(dict.fromkeys(args.keep or [args.column]))


def load_rows(source: str, name: str | None, split: str) -> Any:
    """
    A `datasets.Dataset`.

    Args:
        source (`str`): A file, a folder, or a hub id.
        name (`str`, *optional*): Of a configuration, for datasets of the hub that have several.
        split (`str`): As `datasets` takes it, such as "train" or "test[:100]"; files have "train" only.

    Raises:
        UsageError: where it cannot be loaded, or has no rows.
    """
    try:
        import datasets  # type: ignore[import-untyped]
    except ImportError as error:
        raise UsageError('datasets is missing: pip install "hf-smartspec[data]"') from error
    datasets.disable_progress_bars()
    path = Path(source)
    try:
        if path.is_file():
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
    """Raises `UsageError` for columns that are not there."""
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
    """The first line that says something; `datasets` wraps what has happened."""
    cause = error.__cause__ or error
    lines = str(cause).strip().splitlines() or str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
