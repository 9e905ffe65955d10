"""`smartspec datastore build`: a file of continuations for `DatastoreCandidates`, from texts."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import numpy as np

from ...candidates.text.datastore.file import Document, build_datastore
from ..common.arguments import UsageError, usage_errors
from ..common.models import load_tokenizer
from ..common.outputs import check_output, opened, read_rows, write_json


def run(args: argparse.Namespace) -> int:
    check_output(args.output)
    check_output(args.json)
    for path in args.inputs:
        if not path.is_file():
            raise UsageError(f"no such file: {str(path)!r}")
    tokenizer = load_tokenizer(args.tokenizer)
    if tokenizer is None:
        raise UsageError(f"cannot load a tokenizer from {args.tokenizer!r}")
    started = perf_counter()
    with usage_errors():
        store = build_datastore(read_documents(args.inputs, args.field or ["response"]), args.output, tokenizer)
    seconds, size = perf_counter() - started, args.output.stat().st_size
    result = {
        "output": str(args.output),
        "tokens": store.num_tokens,
        "bytes": size,
        "seconds": round(seconds, 3),
        "fingerprint": store.fingerprint,
    }
    print(f"{args.output}: {store.num_tokens:,} tokens, {size / 1e6:.1f} MB, built in {seconds:.1f} s")
    if args.json:
        write_json(args.json, result)
    return 0


def read_documents(paths: list[Path], fields: list[str]) -> Iterator[Document]:
    """Yield the documents of all files; raises `UsageError` for a file that cannot be read or holds none."""
    for path in paths:
        is_empty = True
        for document in _read(path, fields):
            is_empty = False
            yield document
        if is_empty:
            raise UsageError(f"{str(path)!r} holds no text" + (f" under {fields}" if ".jsonl" in path.suffixes else ""))


def _read(path: Path, fields: list[str]) -> Iterator[Document]:
    if path.suffix == ".npy":
        yield _read_tokens(path)
    elif (path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix) == ".jsonl":
        yield from _read_rows(path, fields)
    else:
        with opened(path) as file:
            text = file.read()
        if text:
            yield text


def _read_rows(path: Path, fields: list[str]) -> Iterator[str]:
    for number, row in read_rows(path):
        for name in fields:
            text = row.get(name) or ""  # not every row has an answer
            if not isinstance(text, str):
                raise UsageError(f"{str(path)!r}, row {number} has no text under {name!r}, but {type(text).__name__}")
            if text:
                yield text


def _read_tokens(path: Path) -> np.ndarray:
    with usage_errors(f"cannot read {str(path)!r}", OSError, EOFError, ValueError):
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    if not isinstance(ids, np.ndarray) or ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise UsageError(f"{str(path)!r} must hold integer token ids along one axis")
    return ids
