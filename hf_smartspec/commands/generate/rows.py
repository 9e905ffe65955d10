"""Rows of a dataset: a file, a folder written by `save_to_disk`, or a dataset of the hub."""

import argparse
import difflib
from pathlib import Path
from typing import Any

from ..common.arguments import UsageError

_LOADERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".txt": "text"}
_PACKED = (".gz", ".bz2", ".xz", ".zst")
_OWN = ("row", "finish_reason", "generated_tokens", "error")  # written in addition to columns and answer


def checked_rows(args: argparse.Namespace) -> Any:
    """
    Return the rows of `--dataset` and its options.

    Raises:
        UsageError: if the dataset or a column does not exist.
    """
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
