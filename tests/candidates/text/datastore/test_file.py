"""The datastore's file: whole or refused, whatever happens to it, and tied to one tokenizer."""

import mmap
import os
import struct
import threading
import zlib

import numpy as np
import pytest

from hf_smartspec.candidates.text.datastore.file import Datastore, build_datastore, tokenizer_fingerprint
from hf_smartspec.candidates.text.datastore.source import DatastoreCandidates

from ....folders import byte_tokenizer

DOCUMENTS = [[0, 1, 2, 3], [1, 2, 3, 3], [], [2, 0, 1]]
HEADER = 128  # bytes


@pytest.fixture
def path(tmp_path):
    build_datastore(DOCUMENTS, tmp_path / "text.sssd")
    return tmp_path / "text.sssd"


def arrays(store):
    return [store.tokens.tolist(), store.suffixes.tolist(), store.starts.tolist()]


def rewrite(path, change):
    """Lets `change` work on the file's bytes."""
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)


# --- What is written is what is read


@pytest.mark.parametrize("documents", [DOCUMENTS, [], [[]], [[5]]])
@pytest.mark.parametrize("verify", [True, False])
def test_a_file_holds_what_was_built(tmp_path, documents, verify):
    built = build_datastore(documents, tmp_path / "text.sssd", vocab_size=7, sort_depth=20)
    opened = Datastore.open(tmp_path / "text.sssd", verify=verify)
    assert arrays(opened) == arrays(built)
    assert (opened.vocab_size, opened.sort_depth, opened.fingerprint) == (7, 20, "")
    assert opened.num_tokens == sum(map(len, documents))


def test_the_text_is_mapped_not_read(path):
    store = Datastore.open(path)
    for part in (store.tokens, store.suffixes, store.starts):
        assert not part.flags.writeable
        while isinstance(part, np.ndarray):
            part = part.base
        assert isinstance(part, mmap.mmap)


def test_a_source_opens_a_path(path):
    for name in (path, str(path)):
        source = DatastoreCandidates(name, min_continuations=1)
        source.start("a", np.array([2, 0]))
        assert source.propose(["a"], [4])[0].tokens.tolist() == [1]


def test_the_same_documents_make_the_same_file(path, tmp_path):
    build_datastore(DOCUMENTS, tmp_path / "again.sssd")
    assert path.read_bytes() == (tmp_path / "again.sssd").read_bytes()


def test_borders_may_lie_within_documents():
    whole = Datastore.from_documents([np.array([0, 1, -1, 1, 2], np.int64)])
    assert arrays(whole) == arrays(Datastore.from_documents([[0, 1], (1, 2)]))


def test_texts_are_tokenised_in_order():
    tokenizer = byte_tokenizer()
    texts = [f"text number {number}" for number in range(600)]  # more than one batch
    store = Datastore.from_documents(iter([*texts, [3, 4]]), tokenizer)
    expected = [token for text in texts for token in [*tokenizer(text).input_ids, -1]]
    assert store.tokens.tolist() == [*expected, 3, 4, -1]
    assert store.vocab_size == len(tokenizer)


# --- Damage


def test_a_file_cut_off_anywhere_is_refused(path):
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        for verify in (True, False):
            with pytest.raises(ValueError, match=r"text\.sssd.*(cut off|no datastore)"):
                Datastore.open(path, verify=verify)
    path.write_bytes(content + b"\0")
    with pytest.raises(ValueError, match="cut off or added to"):
        Datastore.open(path)


def test_every_flipped_bit_is_noticed(path):
    content = path.read_bytes()
    for position in range(len(content)):
        for bit in (1, 128):
            rewrite(path, lambda data: data.__setitem__(position, data[position] ^ bit))  # noqa: B023
            with pytest.raises(ValueError, match=r"text\.sssd.*(damaged|no datastore)"):
                Datastore.open(path, verify=position >= HEADER)
            path.write_bytes(content)
    assert Datastore.open(path).num_tokens == 11


def test_damage_that_nobody_looked_for_leads_to_useless_drafts_at_worst(path):
    content = path.read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(150):
        noise = bytearray(content)
        for position in rng.integers(HEADER, len(content), 6):
            noise[position] = rng.integers(256)
        path.write_bytes(noise)
        source = DatastoreCandidates(Datastore.open(path, verify=False))
        for prompt in ([0], [1], [2, 3], [3], [0, 1, 2, 3]):
            source.start("a", np.array(prompt))
            tree = source.propose(["a"], [16])[0]
            tree.check_integrity(vocab_size=4)
            assert len(tree) <= 16


def test_other_files_are_refused(tmp_path):
    for content in (b"", b"SSSD", b"PK\3\4" * 100, np.zeros(1000).tobytes()):
        (tmp_path / "other").write_bytes(content)
        with pytest.raises(ValueError, match="other' is no datastore"):
            Datastore.open(tmp_path / "other")
    with pytest.raises(FileNotFoundError):
        DatastoreCandidates(tmp_path / "missing")


def test_another_version_is_named(path):
    def change(content):
        content[8:12] = struct.pack("<I", 7)
        content[124:128] = struct.pack("<I", zlib.crc32(content[:124]))

    rewrite(path, change)
    with pytest.raises(ValueError, match="version 7 and this library reads version 1"):
        Datastore.open(path)


# --- Writing


def test_an_interrupted_build_leaves_the_old_file(path, monkeypatch):
    before = path.read_bytes()

    def interrupt(*_):
        raise KeyboardInterrupt

    def documents():
        yield [1]
        interrupt()

    with pytest.raises(KeyboardInterrupt):
        build_datastore(documents(), path)
    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        build_datastore([[1]], path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_builders_at_the_same_time_leave_a_whole_file(tmp_path):
    path = tmp_path / "text.sssd"
    stores = [Datastore.from_documents([[token] * length] * 5) for token, length in ((0, 400), (1, 1000))]
    stores[0].save(path)

    def save(store):
        for _ in range(20):
            store.save(path)

    threads = [threading.Thread(target=save, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert Datastore.open(path).num_tokens in (2000, 5000)
    assert Datastore.open(path).num_tokens in (2000, 5000)
    assert os.listdir(tmp_path) == ["text.sssd"]


def test_an_open_datastore_outlives_its_file(path):
    store = Datastore.open(path)
    before = arrays(store)
    build_datastore([[0]], path)
    assert arrays(store) == before
    assert arrays(Datastore.open(path)) != before


# --- The tokenizer


def test_equal_tokenizers_have_equal_fingerprints(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    again = type(tokenizer).from_pretrained(tmp_path)
    assert tokenizer_fingerprint(tokenizer) == tokenizer_fingerprint(again)
    assert len(tokenizer_fingerprint(again)) == 32
    again.add_tokens(["<new>"])
    assert tokenizer_fingerprint(tokenizer) != tokenizer_fingerprint(again)


def test_a_file_belongs_to_one_tokenizer(tmp_path):
    tokenizer, other = byte_tokenizer(), byte_tokenizer()
    other.add_tokens(["<new>"])
    built = build_datastore(["some text"], tmp_path / "text.sssd", tokenizer)
    assert built.fingerprint == tokenizer_fingerprint(tokenizer)
    assert Datastore.open(tmp_path / "text.sssd", tokenizer).fingerprint == built.fingerprint
    with pytest.raises(ValueError, match=r"text\.sssd was built with another tokenizer"):
        Datastore.open(tmp_path / "text.sssd", other)
    DatastoreCandidates(built, tokenizer=tokenizer)
    for source in (built, tmp_path / "text.sssd"):
        with pytest.raises(ValueError, match="was built with another tokenizer"):
            DatastoreCandidates(source, tokenizer=other)


def test_a_file_of_an_unknown_tokenizer_cannot_be_checked(path):
    with pytest.raises(ValueError, match="does not say which tokenizer"):
        Datastore.open(path, byte_tokenizer())


# --- Refusals


@pytest.mark.parametrize(
    ("documents", "arguments", "error", "match"),
    [
        (["text"], {}, ValueError, "need a tokenizer"),
        ("text", {}, TypeError, "Pass a list"),
        ([b"text"], {}, TypeError, "got bytes"),
        ([[1.5]], {}, TypeError, "got list"),
        ([[[1]]], {}, TypeError, "got list"),
        ([[True]], {}, TypeError, "got list"),
        ([[4]], {"vocab_size": 4}, ValueError, r"lie in \[0, 4\).*got 4 to 4"),
        ([[-2]], {}, ValueError, "got -2"),
        ([[2**31]], {}, ValueError, "2147483648"),
        ([[1]], {"vocab_size": 0}, ValueError, "vocab_size"),
        ([[1]], {"sort_depth": 1}, ValueError, "sort_depth"),
    ],
)
def test_bad_documents_are_refused(documents, arguments, error, match):
    with pytest.raises(error, match=match):
        Datastore.from_documents(documents, **arguments)


def test_a_folder_is_no_file(tmp_path):
    for path in (tmp_path, tmp_path / "missing" / "text.sssd"):
        with pytest.raises(ValueError, match="`path` must name a file"):
            build_datastore(["never read"], path)
