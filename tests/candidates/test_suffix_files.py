"""Files of suffix trees under several processes: whoever reads finds one that was written whole."""

import multiprocessing

import numpy as np

from hf_smartspec import SuffixTreeCandidates
from hf_smartspec.candidates.suffix_corpus import read

_OUTPUT_LEN = 40


def _save_often(path, token, has_begun, may_end):
    """Writes `token` outputs that hold nothing but `token`, again and again, until the reader has seen enough."""
    source = SuffixTreeCandidates(max_bytes=2**20, max_depth=4, max_match=2)
    source.add_outputs([np.full(_OUTPUT_LEN, token)] * token, progress=False)
    while not may_end.is_set():
        source.save(path)
        has_begun.set()


def test_readers_find_whole_files_while_two_processes_save(tmp_path):
    context, path = multiprocessing.get_context("spawn"), tmp_path / "trees"
    may_end = context.Event()
    begun = [context.Event(), context.Event()]
    writers = [
        context.Process(target=_save_often, args=(path, token, event, may_end), daemon=True)
        for token, event in zip((2, 3), begun)
    ]
    for writer in writers:
        writer.start()
    try:
        for event in begun:
            assert event.wait(timeout=60)
        found = set()
        for _ in range(100):
            _, arrays = read(path)  # checks the sum over the whole file
            (token,) = set(arrays["tokens"].tolist())
            assert len(arrays["lengths"]) == token, "outputs of one writer, all of them"
            found.add(token)
        assert found == {2, 3}, "both writers were at work"
    finally:
        may_end.set()
        for writer in writers:
            writer.join(timeout=60)
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert [item.name for item in tmp_path.iterdir()] == ["trees"], "no temporary file is left"
    source = SuffixTreeCandidates.load(path, progress=False, max_bytes=2**20, max_depth=4, max_match=2)
    assert source.num_cached_tokens() in (2 * _OUTPUT_LEN, 3 * _OUTPUT_LEN)
