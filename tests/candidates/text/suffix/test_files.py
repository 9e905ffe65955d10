"""Files of suffix trees: what cannot be read is not written, and whoever reads finds what was written whole."""

import multiprocessing
from collections import Counter

import numpy as np
import pytest

from hf_smartspec import SuffixTreeCandidates
from hf_smartspec.candidates.request import SourceRequest
from hf_smartspec.candidates.text.suffix.files import read
from hf_smartspec.candidates.text.suffix.kernels.mix import new_model

from ....serving.helpers import TIMEOUT

_OPTIONS = {"max_bytes": 2**20, "max_depth": 4, "max_match": 2}
_OUTPUT_LEN = 40


def saver(token):
    """Holds `token` outputs, of nothing but `token`."""
    source = SuffixTreeCandidates(**_OPTIONS)
    source.add_outputs([np.full(_OUTPUT_LEN, token)] * token, progress=False)
    return source


def save_often(path, token, has_begun, may_end):
    source = saver(token)
    while not may_end.is_set():
        source.save(path)
        has_begun.set()


@pytest.mark.end_to_end
def test_readers_find_whole_files_while_two_processes_save(tmp_path):
    context, path = multiprocessing.get_context("spawn"), tmp_path / "trees"
    has_begun, may_end = context.Event(), context.Event()
    other = context.Process(target=save_often, args=(path, 2, has_begun, may_end), daemon=True)
    other.start()
    source, found = saver(3), Counter()
    try:
        assert has_begun.wait(timeout=TIMEOUT), "the other process imports the package first"
        for _ in range(10_000):
            source.save(path)
            for _ in range(20):
                _, arrays = read(path)  # raises if the sum over the whole file is wrong
                (token,) = set(arrays["tokens"].tolist())
                assert len(arrays["lengths"]) == token, "outputs of one process, all of them"
                found[token] += 1
            if min(found[2], found[3]) >= 50:
                break
        assert min(found[2], found[3]) >= 50, "both were at work"
    finally:
        may_end.set()
        other.join(timeout=TIMEOUT)
    assert other.exitcode == 0
    assert [item.name for item in tmp_path.iterdir()] == ["trees"], "no temporary file is left"
    loaded = SuffixTreeCandidates.load(path, progress=False, **_OPTIONS)
    assert loaded.num_cached_tokens() in (2 * _OUTPUT_LEN, 3 * _OUTPUT_LEN)


def with_cell(field, value):
    cells = new_model(2).cells
    cells[1, 5, field] = value
    return {"cells": cells}


@pytest.mark.parametrize(
    ("lines", "arrays", "message"),
    [
        ([["", 10**7]], {}, "lines of their own, below 2"),
        ([["", -1]], {}, "lines of their own"),
        ([["", 0.5]], {}, "lines of their own"),
        ([["", True]], {}, "lines of their own"),
        ([["a", 1], ["b", 1]], {}, "lines of their own"),
        ([[["a"], 1]], {}, "unhashable"),
        ([], {"cells": new_model(2).cells.astype(np.float64)}, "int32, got float64, float32, int32"),
        ([], {"weights": new_model(2).weights.astype(np.int32)}, "int32, got float32, int32, int32"),
        ([], {"weights": new_model(1).weights}, "got 2, 1 and 2"),
        ([], {"cells": new_model(0).cells, "weights": new_model(0).weights}, "got 0, 0 and 0"),
        ([], with_cell(0, 0), "between 0 and 1"),
        ([], with_cell(0, 1), "between 0 and 1"),
        ([], with_cell(0, np.nan), "between 0 and 1"),
        ([], with_cell(1, -1), "observations be finite"),
        ([], with_cell(1, np.inf), "observations be finite"),
        ([], {"weights": np.full_like(new_model(2).weights, np.nan)}, "weights must be finite"),
    ],
)
def test_what_cannot_have_been_learnt_is_refused(tmp_path, lines, arrays, message):
    """The check sum is right, so that nothing else stands between such a file and compiled code."""
    model, path = new_model(2), tmp_path / "trees"
    header = {"lines": lines, "fingerprint": None}
    saver(3)._corpus.save(path, header, {"cells": model.cells, "weights": model.weights} | arrays)
    with pytest.raises(ValueError, match=f"is damaged: .*{message}"):
        SuffixTreeCandidates.load(path, progress=False, **_OPTIONS)


def test_what_a_model_of_another_shape_has_learnt_is_left_out_and_the_texts_are_kept(tmp_path):
    model, path, source = new_model(1), tmp_path / "trees", saver(3)
    learnt = {"cells": model.cells[:, 1:], "weights": model.weights[:, :64, :10]}
    source._corpus.save(path, {"lines": [["", 0]], "fingerprint": None}, learnt)
    loaded = SuffixTreeCandidates.load(path, progress=False, **_OPTIONS)
    assert loaded.num_cached_tokens() == source.num_cached_tokens() > 0
    assert not loaded.has_learnt and (loaded._slots.model.cells == model.cells).all()


def test_lines_of_a_loaded_model_stay_apart(tmp_path):
    path, source = tmp_path / "trees", saver(3)
    for name in ("a", "b", "c"):
        source.begin(SourceRequest(name, np.array([1]), namespace=name))
    source.save(path)
    loaded = SuffixTreeCandidates.load(path, progress=False, **_OPTIONS)
    for name in ("c", "d", "e", "f"):
        loaded.begin(SourceRequest(name, np.array([1]), namespace=name))
    lines = loaded._slots.lines
    assert set(lines) == {*"abcdef"} and len(set(lines.values())) == 6
    assert all(lines[name] == source._slots.lines[name] for name in "abc")


def test_namespaces_that_are_no_strings_are_refused_even_without_outputs(tmp_path):
    source, path = SuffixTreeCandidates(**_OPTIONS), tmp_path / "trees"
    source.begin(SourceRequest("a", np.array([1, 2]), namespace=("tenant", 1)))
    source.stop("a")
    with pytest.raises(ValueError, match=r"must be strings to be saved, got \[\('tenant', 1\)\]"):
        source.save(path)
    assert not path.exists()
