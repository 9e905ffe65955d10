"""Replicas that share what they served: nothing is lost, and nothing counted twice."""

import threading

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_smartspec import SuffixTreeCandidates
from hf_smartspec.replicas import SharedOutputs
from hf_smartspec.replicas.sharing.folder import SharedFolder

from ...covering import examples
from ...folders import byte_tokenizer
from ...serving.helpers import TIMEOUT
from .replicas import OPTIONS, drafted, held, new_source, replica, serve


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


@settings(max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
        assert has_come.wait(TIMEOUT)
    assert held(two) == held(one)
    assert not [thread for thread in threading.enumerate() if thread.name == "hf-smartspec sharing"]


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
