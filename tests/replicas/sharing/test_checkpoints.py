"""Checkpoints of drafters in a shared folder: the newest whole one is what a replica begins from."""

import os
import threading

import pytest
import torch

import hf_smartspec
from hf_smartspec import OnlineDistillation, SmartSpecConfig
from hf_smartspec.replicas import SharedCheckpoints
from tests.online.helpers import new_drafter, new_target
from tests.serving.helpers import TIMEOUT


def shared(tmp_path, replica, **options):
    return SharedCheckpoints(str(tmp_path / "shared"), tmp_path / replica, **options), tmp_path / replica / "drafter.pt"


def write(path, data, when):
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    os.utime(path, ns=(when, when))


def test_the_newest_is_what_others_begin_from(tmp_path):
    (one, first), (two, second), (late, third) = (shared(tmp_path, name) for name in "abc")
    write(first, b"older", 100)
    write(second, b"newer", 200)
    assert two.publish() == one.publish() == ["drafter.pt"]
    assert one.publish() == [], "nothing has changed"
    assert late.pull() == ["drafter.pt"] and third.read_bytes() == b"newer"
    assert late.publish() == [], "what was taken is not news"


def test_what_is_newer_here_stays(tmp_path):
    (one, first), (two, second) = (shared(tmp_path, name) for name in "ab")
    write(first, b"older", 100)
    one.publish()
    write(second, b"newer", 200)
    assert two.pull() == [] and second.read_bytes() == b"newer"


def test_what_is_taken_looks_as_old_as_it_is_from_the_beginning(tmp_path, monkeypatch):
    (one, first), (late, third) = (shared(tmp_path, name) for name in "ac")
    write(first, b"older", 10**9)
    one.publish()
    replace, seen = os.replace, []

    def watched(source, destination):
        seen.append(os.stat(source).st_mtime_ns)
        replace(source, destination)

    monkeypatch.setattr(os, "replace", watched)
    assert late.pull() == ["drafter.pt"] and seen == [10**9] and third.stat().st_mtime_ns == 10**9


@pytest.mark.parametrize("old", [[], [b"old"]])
def test_what_a_learner_saves_while_another_is_taken_stays(tmp_path, monkeypatch, old):
    (one, first), (two, second) = (shared(tmp_path, name) for name in "ab")
    write(first, b"of another", 200)
    one.publish()
    for data in old:
        write(second, data, 100)
    sync = os.fsync

    def synced(descriptor):
        monkeypatch.undo()
        sync(descriptor)
        write(second, b"newest", 300)

    monkeypatch.setattr(os, "fsync", synced)
    assert two.pull() == [] and second.read_bytes() == b"newest" and os.listdir(second.parent) == ["drafter.pt"]
    assert two.publish() == ["drafter.pt"]


def test_damaged_ones_are_left_for_the_newest_whole_one(tmp_path):
    (one, first), (late, third) = (shared(tmp_path, name) for name in "ac")
    for when, data in ((100, b"older"), (200, b"newer")):
        write(first, data, when)
        one.publish()
    newest = max((tmp_path / "shared").iterdir())
    newest.write_bytes(newest.read_bytes()[:-1])
    (tmp_path / "shared" / "x-y.checkpoint").write_bytes(b"")
    (tmp_path / "shared" / "300-z-..%2Fout.checkpoint").write_bytes(b"")
    assert late.pull() == ["drafter.pt"] and third.read_bytes() == b"older"


def test_few_are_kept(tmp_path):
    one, first = shared(tmp_path, "a")
    for when in range(1, 9):
        write(first, bytes([when]), 100 * when)
        one.publish()
    assert len(list((tmp_path / "shared").iterdir())) == 3
    late, third = shared(tmp_path, "c")
    late.pull()
    assert third.read_bytes() == bytes([8])


def test_changes_are_published_while_attached(tmp_path):
    one, first = shared(tmp_path, "a", interval=0.01)
    has_come, write_remote = threading.Event(), one._folder.write

    def noticed(*args):
        write_remote(*args)
        has_come.set()

    one._folder.write = noticed
    with one.attached():
        write(first, b"learnt", 100)
        assert has_come.wait(TIMEOUT)
    late, third = shared(tmp_path, "c")
    with late.attached():
        assert third.read_bytes() == b"learnt"


def test_a_fresh_replica_drafts_with_what_another_has_learnt(tmp_path):
    target = new_target()
    ids = torch.arange(5, 13)[None]

    def serve(replica, requests):
        folder = tmp_path / replica
        with SharedCheckpoints(str(tmp_path / "shared"), folder).attached():
            online = OnlineDistillation(background=False, every_requests=1, checkpoint=folder, shadow=0, tolerance=1.0)
            draft = new_drafter("draft", target)
            config = SmartSpecConfig(draft, num_nodes=3, online=online)
            with hf_smartspec.enabled(target):
                for _ in range(requests):
                    target.generate(ids, max_new_tokens=6, do_sample=False, assistant=config)
            online.close()
        return draft

    learnt, fresh = serve("a", 3), serve("b", 1)
    begun = new_drafter("draft", target)
    weights = [dict(model.named_parameters()) for model in (begun, learnt, fresh)]
    name = next(iter(weights[0]))
    assert not torch.equal(weights[0][name], weights[1][name])
    assert (tmp_path / "b").is_dir()
    # One more update stands between them.
    distance = [float((weights[place][name] - weights[2][name]).abs().mean()) for place in (0, 1)]
    assert distance[1] < distance[0]


def test_errors_before_work_starts(tmp_path):
    with pytest.raises(ValueError, match="`interval` must be positive"):
        SharedCheckpoints(str(tmp_path), tmp_path, interval=0)
    with pytest.raises(ValueError, match="cannot be reached"):
        SharedCheckpoints("nosuchprotocol://x", tmp_path)
