"""Look-up tables of draft lengths by batch size (Su et al., section 4), kept beside a model's profile."""

import json
from pathlib import Path

from transformers import PreTrainedModel

from ...files import replacing
from ...goodput.papers.policies import BatchLookupTable
from .profiling import profile_path


def tables_path(model: PreTrainedModel) -> Path:
    """Return the path of the model's tables, which, like its profile, hold for this machine and way of running it."""
    return profile_path(model).with_suffix(".tables.json")


def keep_table(model: PreTrainedModel, source: str, table: BatchLookupTable) -> Path:
    """
    File a table for drafts of a source (`candidates.base.saved_name`) in place of an earlier one.

    Raises:
        OSError: if the file cannot be written.
    """
    path = tables_path(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    tables = _read(path) | {source: {str(size): length for size, length in table.lengths.items()}}
    with replacing(path) as file:
        file.write(json.dumps(tables, indent=2).encode())
    return path


def load_table(model: PreTrainedModel, source: str) -> BatchLookupTable:
    """
    Return the model's table for drafts of a source.

    Raises:
        ValueError: if none was measured, on this machine, for the model as it is run now.
    """
    tables = _read(tables_path(model))
    if source not in tables:
        known = f" (there are some for {', '.join(sorted(tables))})" if tables else ""
        raise ValueError(
            f"`policy='table'`: no look-up table for drafts of {source!r} is kept for {type(model).__name__} in "
            f"{model.dtype} on this machine{known}. Measure one with `smartspec profile MODEL --table PROMPTS "
            "--assistant NAME`, or pass a `BatchLookupTable`."
        )
    return BatchLookupTable({int(size): length for size, length in tables[source].items()})


def _read(path: Path) -> dict[str, dict[str, int]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    tables = content if isinstance(content, dict) else {}
    return {source: table for source, table in tables.items() if isinstance(table, dict)}
