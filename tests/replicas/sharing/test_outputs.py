"""Replicas that share what they served: nothing lost, nothing counted twice, nothing damaged taken."""

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_smartspec import SuffixTreeCandidates
from hf_smartspec.candidates.request import SourceRequest
from hf_smartspec.candidates.text.suffix.files import _MAGIC, packed, unpacked
from hf_smartspec.replicas import SharedOutputs
from hf_smartspec.replicas.sharing.folder import SharedFolder
from hf_smartspec.replicas.sharing.snapshot import SharedOutput, pack, unpack
from tests.folders import byte_tokenizer

OPTIONS = {"max_bytes": 2**21, "max_depth": 8, "max_match": 4}
TOKENIZER = byte_tokenizer()


def new_source():
    return SuffixTreeCandidates(**OPTIONS)


def replica(url, **options):
    return SharedOutputs(str(url), TOKENIZER, **options), new_source()


def serve(source, name, prompt, answer, namespace=""):
    """A request, drafted for and observed token by token."""
    source.begin(SourceRequest(name, np.array(prompt), namespace=namespace))
    for token in answer:
        source.propose([name], [8])
        source.observe(name, np.array([token]))
    source.stop(name)


def held(source):
    """What is remembered, by namespace, in any order."""
    return sorted((namespace, tokens.tolist()) for _, namespace, tokens in source.outputs())


def crafted(head, values=b""):
    """A file's contents with a right check sum, whatever stands in it."""
    content = len(head).to_bytes(8, "little") + head + values
    return _MAGIC + hashlib.blake2b(content, digest_size=32).digest() + content


def drafted(source, prompt, namespace=""):
    source.begin(SourceRequest("asked", np.array(prompt), namespace=namespace))
    (tree,) = source.propose(["asked"], [8])
    source.stop("asked")
    return tree.tokens.tolist()


def test_what_one_replica_served_another_drafts(tmp_path):
    (first, one), (second, two) = replica(tmp_path), replica(tmp_path)
    serve(one, "a", [1, 2, 3], [10, 11, 12, 13, 14, 15])
    assert not drafted(two, [9, 10, 11])
    assert first.publish(one) == 1 and second.pull(two) == 1
    assert drafted(two, [9, 10, 11])[:3] == [12, 13, 14]
    assert held(two) == held(one)


def test_outputs_count_once_however_often_they_go_round(tmp_path):
    replicas = [replica(tmp_path, max_files=1) for _ in range(3)]
    for number, (_, source) in enumerate(replicas):
        serve(source, "a", [1, 2, 3], [10 + number, 11, 12, 13])
    for _ in range(4):
        for shared, source in replicas:
            shared.pull(source)
            shared.publish(source)
            shared.merge()
    wanted = held(replicas[0][1])
    assert len(wanted) == 3
    assert all(held(source) == wanted for _, source in replicas)
    late, source = replica(tmp_path)
    assert late.pull(source) == 3 and held(source) == wanted
    assert late.pull(source) == 0 and late.publish(source) == 0


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from("spulm")), max_size=40))
def test_whatever_the_order_nothing_is_lost_or_counted_twice(tmp_path_factory, steps):
    """Replicas serve, publish, pull and merge as it happens, and some die without a word (`l`)."""
    url = tmp_path_factory.mktemp("shared")
    replicas = [replica(url, max_files=2) for _ in range(3)]
    published, waiting = [], [[], [], []]
    for step, (who, what) in enumerate(steps):
        shared, source = replicas[who]
        if what == "s":
            answer = [20 + step % 50, 5, 6, who]
            serve(source, step, [1, 2], answer)
            waiting[who].append(("", [1, 2, *answer]))
        elif what == "p":
            assert shared.publish(source) == len(waiting[who])
            published += waiting[who]
            waiting[who] = []
        elif what == "u":
            shared.pull(source)
        elif what == "m":
            shared.merge()
        else:
            replicas[who], waiting[who] = replica(url, max_files=2), []
    for who, (shared, source) in enumerate(replicas):
        shared.pull(source)
        assert held(source) == sorted(published + waiting[who])


def test_damaged_half_written_and_foreign_files_are_left_alone(tmp_path, caplog):
    shared, source = replica(tmp_path)
    for number in range(3):
        serve(source, number, [1, 2, 3], [10 + number, 20, 30])
        shared.publish(source)
    whole = sorted(path for path in tmp_path.iterdir() if path.suffix == ".outputs")
    assert len(whole) == 3
    data = whole[0].read_bytes()
    whole[0].write_bytes(data[:-5])
    whole[1].write_bytes(data[:60] + bytes([data[60] ^ 1]) + data[61:])
    (tmp_path / f"x-{shared._fingerprint[:8]}.outputs").write_bytes(b"something else")
    late, other = replica(tmp_path)
    assert late.pull(other) == 1 and held(other) == [("", [1, 2, 3, 12, 20, 30])]
    # What was half written is taken once it is whole.
    whole[0].write_bytes(data)
    assert late.pull(other) == 1 and len(held(other)) == 2


def test_what_is_no_readable_file_is_left_alone_and_reported_once(tmp_path, caplog):
    shared, source = replica(tmp_path)
    serve(source, "a", [1, 2, 3], [10, 11, 12])
    shared.publish(source)
    end = f"-{shared._fingerprint[:8]}.outputs"
    (tmp_path / f"folder{end}").mkdir()
    (tmp_path / f"dangling{end}").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / f"pipe{end}")
    (tmp_path / f"deep{end}").write_bytes(crafted(b"[" * 100_000))
    (tmp_path / f"locked{end}").write_bytes(b"")
    (tmp_path / f"locked{end}").chmod(0)
    late, other = replica(tmp_path)
    assert late.pull(other) == 1 and held(other) == held(source)
    assert late.pull(other) == 0
    for name in ("folder", "dangling", "pipe", "deep", "locked"):
        assert caplog.text.count(f"{name}{end} is left alone") == 1
    serve(other, "b", [1, 2, 3], [20, 21, 22])
    assert late.publish(other) == 1 and shared.pull(source) == 1


def test_other_tokenizers_share_a_folder_without_seeing_one_another(tmp_path):
    shared, source = replica(tmp_path)
    serve(source, "a", [1, 2, 3], [10, 11, 12])
    shared.publish(source)
    larger = byte_tokenizer()
    larger.add_tokens(["<another>"])
    foreign, other = SharedOutputs(str(tmp_path), larger, max_files=1), new_source()
    assert foreign.pull(other) == 0 and not held(other)
    serve(other, "a", [1, 2, 3], [7, 7, 7])
    foreign.publish(other)
    foreign.merge()
    late, again = replica(tmp_path)
    assert late.pull(again) == 1 and held(again) == held(source)


def test_namespaces_stay_apart(tmp_path):
    (first, one), (second, two) = replica(tmp_path), replica(tmp_path)
    serve(one, "a", [1, 2, 3], [10, 11, 12, 13, 14], namespace="tenant")
    first.publish(one)
    second.pull(two)
    assert not drafted(two, [9, 10, 11], namespace="another")
    assert drafted(two, [9, 10, 11], namespace="tenant")[:2] == [12, 13]


def test_the_oldest_go_when_the_folder_is_full(tmp_path):
    shared, source = replica(tmp_path, max_tokens=20, max_files=1)
    for number in range(6):
        serve(source, number, [1, 2], [30 + number, 5, 6])
        shared.publish(source)
        shared.merge()
    late, other = replica(tmp_path)
    late.pull(other)
    assert [tokens[2] for _, tokens in held(other)] == [32, 33, 34, 35]


def test_a_fresh_replica_drafts_as_the_old_one_from_its_first_request(tmp_path):
    generator = np.random.default_rng(0)
    phrases = generator.integers(10, 200, (12, 6))
    (first, old), (second, fresh) = replica(tmp_path), replica(tmp_path)
    for name in range(40):
        answer = phrases[generator.integers(0, 12, 5)].flatten()
        serve(old, name, [1, 2, 3], answer.tolist())
    first.publish(old)
    second.pull(fresh)
    for phrase in phrases:
        trees = []
        for source in (old, fresh):
            source.start("asked", np.array([1, *phrase[:3]]))
            trees += source.propose(["asked"], [8])
            source.stop("asked")
        assert trees[0].tokens.tolist() == trees[1].tokens.tolist()
        # When outputs were last of use is not shared.
        np.testing.assert_allclose(trees[0].probs, trees[1].probs, rtol=1e-3)


def test_attached_replicas_exchange_by_themselves(tmp_path):
    (first, one), (second, two) = replica(tmp_path, interval=0.01), replica(tmp_path, interval=0.01)
    has_come, add_outputs = threading.Event(), two.add_outputs

    def noticed(*args, **kwargs):
        has_come.set()
        return add_outputs(*args, **kwargs)

    two.add_outputs = noticed
    with first.attached(one), second.attached(two):
        serve(one, "a", [1, 2, 3], [10, 11, 12])
        assert has_come.wait(30)
    assert held(two) == held(one)
    assert not [thread for thread in threading.enumerate() if thread.name == "hf-smartspec sharing"]


def test_what_dead_writers_left_is_swept_up(tmp_path, monkeypatch):
    shared, source = replica(tmp_path)
    with monkeypatch.context() as patch:  # a process that dies removes nothing
        patch.setattr(shared._folder._fs, "mv", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        patch.setattr(shared._folder._fs, "rm_file", lambda *args: None)
        serve(source, "a", [1, 2, 3], [10, 11, 12])
        with pytest.raises(KeyboardInterrupt):
            shared.publish(source)
    (left,) = tmp_path.iterdir()
    late, other = replica(tmp_path)
    with late.attached(other):
        assert list(tmp_path.iterdir()) == [left], "somebody may be writing it"
    now = time.time_ns()
    monkeypatch.setattr("hf_smartspec.replicas.sharing.folder.time.time_ns", lambda: now + 2 * 3600 * 10**9)
    (tmp_path / ".foreign.tmp").touch()
    with late.attached(other):
        assert [path.name for path in tmp_path.iterdir()] == [".foreign.tmp"]


def test_a_folder_that_fails_disturbs_nobody(tmp_path, monkeypatch):
    shared, source = replica(tmp_path)
    serve(source, "a", [1, 2, 3], [10, 11, 12])
    with monkeypatch.context() as patch:
        patch.setattr(SharedFolder, "write", lambda *args: (_ for _ in ()).throw(OSError("no space")))
        with shared.attached(source):
            pass
    assert shared.publish(source) == 1, "what could not be written is written later"


def test_files_that_others_merge_meanwhile_are_read_all_the_same(tmp_path, monkeypatch):
    (first, one), (second, two) = replica(tmp_path, max_files=1), replica(tmp_path)
    for number in range(3):
        serve(one, number, [1, 2], [30 + number, 5, 6])
        first.publish(one)
    read, merged = SharedFolder.read, []

    def read_late(self, name):
        if not merged:
            merged.append(True)
            first.merge()
        return read(self, name)

    monkeypatch.setattr(SharedFolder, "read", read_late)
    assert second.pull(two) == 3 and held(two) == held(one)


def test_file_systems_without_folders(tmp_path):
    (first, one), (second, two) = replica("memory://shared/here"), replica("memory://shared/here")
    serve(one, "a", [1, 2, 3], [10, 11, 12])
    assert first.publish(one) == 1 and second.pull(two) == 1


def test_object_stores_without_a_file_in_the_folder(monkeypatch):
    """They raise for what is empty."""
    (first, one), (second, two) = replica("memory://store/empty"), replica("memory://store/empty")
    files = first._folder._fs

    def listed(path, detail=False, **kwargs):
        if not (found := [name for name in files.store if name.startswith("/store/empty/")]):
            raise FileNotFoundError(path)
        return found

    monkeypatch.setattr(files, "ls", listed)
    serve(one, "a", [1, 2, 3], [10, 11, 12])
    with first.attached(one):
        pass
    assert second.pull(two) == 1


def test_what_was_added_or_loaded_is_nobodys_request(tmp_path):
    (first, one), (second, two) = replica(tmp_path / "shared"), replica(tmp_path / "shared")
    one.add_outputs([[5, 6, 7, 8]], progress=False)
    one.save(tmp_path / "trees")
    loaded = SuffixTreeCandidates.load(tmp_path / "trees", progress=False, **OPTIONS)
    serve(loaded, "a", [1, 2, 3], [10, 11, 12])
    assert first.publish(one) == 0 and first.publish(loaded) == 1
    assert second.pull(two) == 1 and held(two) == [("", [1, 2, 3, 10, 11, 12])]
    assert [number for number, *_ in loaded.outputs(only_served=True)] == [2] and len(loaded.outputs()) == 2


def test_namespaces_that_are_no_strings_stay_here_and_others_are_shared(tmp_path):
    (first, one), (second, two) = replica(tmp_path), replica(tmp_path)
    serve(one, "a", [1, 2, 3], [7, 8, 9], namespace=("a", "tuple"))
    serve(one, "b", [1, 2, 3], [10, 11, 12])
    with first.attached(one):
        pass
    assert second.pull(two) == 1 and held(two) == [("", [1, 2, 3, 10, 11, 12])]
    assert first.publish(one) == 0


def test_what_others_have_in_the_folder_is_no_reason_to_merge(tmp_path):
    larger = byte_tokenizer()
    larger.add_tokens(["<another>"])
    foreign, other = SharedOutputs(str(tmp_path), larger), new_source()
    shared, source = replica(tmp_path, max_files=1)
    for number in range(3):
        serve(other, number, [1, 2], [30 + number, 5, 6])
        foreign.publish(other)
        (tmp_path / f"{number}-damaged-{shared._fingerprint[:8]}.outputs").write_bytes(b"something")
    serve(source, "a", [1, 2], [40, 5, 6])
    shared.publish(source)
    assert shared.pull(source) == 0 and not shared.merge()


def test_what_is_known_is_no_more_than_what_is_in_the_folder(tmp_path):
    (first, one), (second, two) = replica(tmp_path, max_files=1), replica(tmp_path)
    for number in range(12):
        serve(one, number, [1, 2], [30 + number, 5, 6])
        first.publish(one)
        for _ in range(number % 3):
            first.merge()
            second.pull(two)
    second.pull(two)
    assert held(two) == held(one)
    assert len(second._read) <= 4


def test_files_whose_content_makes_no_sense_hold_nobody_up(tmp_path):
    (first, one), (late, two) = replica(tmp_path), replica(tmp_path)
    serve(one, "a", [1, 2, 3], [10, 11, 12])
    first.publish(one)
    item = SharedOutput("x", 1, 1, "", np.array([1, -2], np.int32))
    header = {"kind": "outputs", "fingerprint": first._fingerprint, "names": 3, "replicas": None}
    for number, data in enumerate([pack([item], first._fingerprint), packed(header, {"tokens": item.tokens})]):
        (tmp_path / f"{number}-{first._fingerprint[:8]}.outputs").write_bytes(data)
    assert late.pull(two) == 1 and held(two) == held(one)


def test_what_cannot_be_read_keeps_nobody_from_writing_and_is_reported_once(tmp_path, monkeypatch, caplog):
    shared, source = replica(tmp_path, interval=0.001)
    serve(source, "a", [1, 2, 3], [10, 11, 12])
    (tmp_path / f"0-x-{shared._fingerprint[:8]}.outputs").write_bytes(b"what may not be read")
    attempts, enough = [], threading.Event()

    def refused(self, name):
        attempts.append(name)
        if len(attempts) > 5:
            enough.set()
        raise PermissionError(len(attempts))  # never the same words

    with monkeypatch.context() as patch:
        patch.setattr(SharedFolder, "read", refused)
        with shared.attached(source):
            assert enough.wait(30)
    assert len([item for item in caplog.records if "is left alone" in item.getMessage()]) == 1
    late, other = replica(tmp_path)
    assert late.pull(other) == 1


def test_few_files_of_what_is_learnt_are_kept_and_rarely_written(tmp_path):
    for number in range(6):
        shared, source = replica(tmp_path, interval=1e-9)
        serve(source, "a", [1, 2, 3], [10, 11, 12, 10 + number, 11, 12])
        shared.publish(source)
    files = sorted(tmp_path.glob("*.learnt"))
    assert len(files) == 3
    shared, source = replica(tmp_path)  # every 30 seconds
    serve(source, "a", [1, 2, 3], [10, 11, 12])
    assert shared.publish(source) == 1 and sorted(tmp_path.glob("*.learnt")) == files
    files[-1].write_bytes(files[-1].read_bytes()[:-1])
    late, other = replica(tmp_path)
    late.pull(other)
    assert other.has_learnt


@pytest.mark.parametrize(
    "url, options, message",
    [
        ("nosuchprotocol://x", {}, "cannot be reached"),
        ("here", {"interval": 0}, "`interval` must be positive"),
        ("here", {"max_files": 0}, "`max_files`"),
    ],
)
def test_errors_before_work_starts(tmp_path, monkeypatch, url, options, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        SharedOutputs(url, TOKENIZER, **options)


@pytest.fixture(params=[0o022, 0o077, 0o000])
def umask(request):
    before = os.umask(request.param)
    yield
    os.umask(before)


def modes(folder):
    return {path.stat().st_mode & 0o7777 for path in folder.iterdir()}


def test_texts_are_their_owners_alone(tmp_path, umask):
    shared, source = replica(tmp_path / "new" / "folder")
    serve(source, "a", [1, 2, 3], [10, 11, 12])
    shared.publish(source)
    shared._folder.salt()
    folder = tmp_path / "new" / "folder"
    assert folder.stat().st_mode & 0o777 == 0o700 and modes(folder) == {0o600}
    source.save(tmp_path / "trees")
    source.save(tmp_path / "trees")
    assert (tmp_path / "trees").stat().st_mode & 0o777 == 0o600


def test_in_a_groups_folder_its_group_may_read(tmp_path, umask):
    folder = tmp_path / "group"
    folder.mkdir()
    folder.chmod(0o2770)
    shared, source = replica(folder)
    serve(source, "a", [1, 2, 3], [10, 11, 12])
    shared.publish(source)
    source.save(folder / "trees")
    assert modes(folder) == {0o640} and folder.stat().st_mode & 0o7777 == 0o2770


@pytest.mark.parametrize("protocol", ["", "memory://"])
def test_a_folder_has_one_salt(tmp_path, protocol):
    url, found, barrier = f"{protocol}{tmp_path}/salted", [], threading.Barrier(8)

    def ask():
        folder = SharedFolder(url)
        barrier.wait()
        found.append(folder.salt())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(found)) == 1 and len(found[0]) == 32
    assert not any(name.startswith(".") for name in SharedFolder(url)._all())


def test_processes_that_come_at_once_find_one_salt(tmp_path):
    folder = "from hf_smartspec.replicas.sharing.folder import SharedFolder as Folder"
    code = f"{folder}; print(Folder({str(tmp_path)!r}).salt().hex())"
    begun = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(2)]
    assert len({process.communicate()[0] for process in begun}) == 1


def test_a_damaged_salt_is_no_salt(tmp_path):
    (tmp_path / "salt").write_bytes(b"short")
    with pytest.raises(ValueError, match="must hold 32 bytes, got 5"):
        SharedFolder(str(tmp_path)).salt()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 5) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
arrays_of_files = st.dictionaries(
    st.sampled_from(
        ["tokens", "lengths", "namespaces", "used", "served", "numbers", "times", "cells", "weights", "likely"]
    ),
    st.tuples(
        st.sampled_from(["<i4", "<i8", "<f4", "<u1", "|O", "<U3", "(,)i4", "nonsense"]),
        st.lists(st.integers(-2, 5), max_size=3),
    ),
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_whatever_a_file_holds_it_is_taken_or_refused_in_one_way(tmp_path_factory, data):
    """Headers and arrays that were made on purpose, with a right check sum, instead of a real file's."""
    source = new_source()
    serve(source, "a", [1, 2, 3], [10, 11, 12], namespace="tenant")
    path = tmp_path_factory.mktemp("crafted") / "trees"
    source.save(path)
    header, arrays = unpacked(path.read_bytes(), "trees")
    for kind in ("outputs", "learnt", None):
        changed = header | {"kind": kind, "fingerprint": "x", "names": ["", "a"], "replicas": ["r"]}
        changed |= data.draw(
            st.dictionaries(st.sampled_from(["names", "replicas", "lines", "fingerprint", "kind"]), json_values)
        )
        own = {key: (array.dtype.str, list(array.shape)) for key, array in arrays.items()} | data.draw(arrays_of_files)
        changed["arrays"] = own if data.draw(st.booleans()) else data.draw(json_values)
        changed["version"] = data.draw(st.just(1) | json_values)
        values = b"".join(array.tobytes() for array in arrays.values()) + data.draw(st.binary(max_size=64))
        content = crafted(json.dumps(changed).encode(), values)
        path.write_bytes(content)
        try:
            loaded = SuffixTreeCandidates.load(path, progress=False, **OPTIONS)
        except ValueError:
            pass
        else:
            assert len(drafted(loaded, [9, 10, 11], "a")) <= 8
        with suppress(ValueError):
            unpack(content, "x", "name")
