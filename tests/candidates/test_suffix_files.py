"""A file of suffix trees under two processes that save to it: whoever reads finds one that was written whole."""

import multiprocessing
from collections import Counter

import numpy as np

from hf_smartspec import SuffixTreeCandidates
from hf_smartspec.candidates.suffix_corpus import read

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


def test_readers_find_whole_files_while_two_processes_save(tmp_path):
    context, path = multiprocessing.get_context("spawn"), tmp_path / "trees"
    has_begun, may_end = context.Event(), context.Event()
    other = context.Process(target=save_often, args=(path, 2, has_begun, may_end), daemon=True)
    other.start()
    source, found = saver(3), Counter()
    try:
        assert has_begun.wait(timeout=120), "the other process imports the package first"
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
        other.join(timeout=60)
    assert other.exitcode == 0
    assert [item.name for item in tmp_path.iterdir()] == ["trees"], "no temporary file is left"
    loaded = SuffixTreeCandidates.load(path, progress=False, **_OPTIONS)
    assert loaded.num_cached_tokens() in (2 * _OUTPUT_LEN, 3 * _OUTPUT_LEN)
