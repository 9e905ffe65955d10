"""The bandit finds, and follows, the drafter with the highest goodput, apart for every kind of text."""

import numpy as np
import pytest

from hf_smartspec import RoutedCandidates, SmartSpecConfig, TreeCandidateGenerator, enable
from hf_smartspec.candidates.combined.routed.bandit import DrafterBandit, Outcome
from hf_smartspec.candidates.combined.routed.neighbours import Neighbours

from ....covering import exhaustive
from ....generate.helpers import Oracle, prompts, tiny_llama
from .articles import ARTICLES

REST = 0.01  # seconds of a step beside drafting


class World:
    """Drafters' tokens per step and drafting seconds, by kind of text; requests of 8 to 64 steps."""

    def __init__(self, seed=0):
        self.rng, self.load = np.random.default_rng(seed), 1.0

    def serve(self, bandit, kind, lengths, drafting, sketch=None):
        """The drafter that was chosen, after it has served."""
        name = bandit.choose(kind, sketch)
        steps = int(self.rng.integers(8, 65))
        tokens = round(steps * lengths[name] * self.rng.normal(1.0, 0.15))
        bandit.update(Outcome(name, kind, tokens, steps, steps * drafting[name], steps * REST * self.load, sketch))
        return name


def share(world, bandit, name, num=100, kind="", lengths=None, drafting=None):
    found = [world.serve(bandit, kind, lengths, drafting or dict.fromkeys(lengths, 0.002)) for _ in range(num)]
    return found.count(name) / num


@pytest.mark.parametrize("seed", range(5))
def test_the_better_of_two_drafters_is_found(seed):
    world, bandit = World(seed), DrafterBandit(["poor", "good"], seed=seed)
    lengths = {"poor": 2.0, "good": 2.6}
    share(world, bandit, "good", 60, lengths=lengths)
    assert share(world, bandit, "good", lengths=lengths) > 0.85
    goodput = bandit.goodput()
    assert goodput["good"] == pytest.approx(2.6 / 0.012, rel=0.1)
    assert goodput["poor"] < goodput["good"]


def test_what_counts_is_time():
    """More tokens per step, and twice the step's time."""
    world, bandit = World(), DrafterBandit(["slow", "quick"])
    lengths, drafting = {"slow": 3.0, "quick": 2.0}, {"slow": 0.01, "quick": 0.0005}
    share(world, bandit, "quick", 60, lengths=lengths, drafting=drafting)
    assert share(world, bandit, "quick", lengths=lengths, drafting=drafting) > 0.85


def test_kinds_of_text_are_told_apart():
    world, bandit = World(), DrafterBandit(["ja", "code"])
    of_kind = {"ja": {"ja": 3.0, "code": 1.5}, "code": {"ja": 1.6, "code": 3.2}}
    for _ in range(60):
        for kind, lengths in of_kind.items():
            share(world, bandit, kind, 1, kind, lengths)
    assert all(share(world, bandit, kind, 100, kind, lengths) > 0.9 for kind, lengths in of_kind.items())
    assert bandit.kinds == ["ja", "code"] and bandit.goodput("ja")["ja"] > 1.25 * bandit.goodput("ja")["code"]


def test_drafters_that_get_better_are_noticed():
    world, bandit = World(), DrafterBandit(["old", "learning"], half_life=100)
    share(world, bandit, "old", 200, lengths={"old": 2.5, "learning": 1.5})
    assert share(world, bandit, "old", lengths={"old": 2.5, "learning": 1.5}) > 0.85
    later = {"old": 2.5, "learning": 3.5}
    share(world, bandit, "learning", 400, lengths=later)
    assert share(world, bandit, "learning", lengths=later) > 0.85


def test_load_speaks_for_no_drafter():
    """While steps become ten times as slow, the better drafter stays the better one."""
    world, bandit = World(), DrafterBandit(["poor", "good"])
    lengths = {"poor": 2.0, "good": 2.8}
    share(world, bandit, "good", 60, lengths=lengths)
    world.load = 10.0
    assert share(world, bandit, "good", lengths=lengths) > 0.85


def test_what_teaches_nothing_is_left_out_and_kinds_are_bounded():
    bandit = DrafterBandit(["a", "b"])
    bandit.update(Outcome("a", "", 0, 0, 0.1, 0.0))
    assert bandit.goodput() == {"a": 0.0, "b": 0.0} and bandit.kinds == []
    for number in range(300):
        bandit.update(Outcome("a", f"kind {number}", 20, 10, 0.1, 0.1))
    assert len(bandit.kinds) == 256 and "kind 0" not in bandit.kinds and "kind 299" in bandit.kinds
    assert {bandit.choose("new") for _ in range(50)} == {"a", "b"}


@pytest.mark.parametrize("as_ids", [False, True])
def test_texts_that_resemble_one_another_are_a_kind_without_a_name(as_ids):
    """Nobody says that there are languages, of which each drafter suits two."""
    world, bandit = World(), DrafterBandit(["north", "south"])
    rng, found, drafting = np.random.default_rng(1), [], {"north": 0.002, "south": 0.002}
    suits = {"en": "north", "de": "north", "fr": "south", "es": "south"}
    for _ in range(400):
        language = rng.choice(list(ARTICLES))
        words = ARTICLES[language].split()
        first = int(rng.integers(len(words) - 12))
        text = " ".join(words[first : first + 12])
        sketch = bandit.neighbours.sketch(np.array([hash_of(word) for word in text.split()]) if as_ids else text)
        lengths = {name: 3.0 if name == suits[language] else 1.6 for name in bandit.names}
        found.append(world.serve(bandit, "", lengths, drafting, sketch) == suits[language])
    assert np.mean(found[:50]) < 0.9 < np.mean(found[200:])


def hash_of(word):
    return int.from_bytes(word.encode()[:4], "little")


def test_the_latest_outcomes_are_kept():
    neighbours = Neighbours(num_kept=40, num_nearest=8)
    sketches = [neighbours.sketch(f"text number {number}") for number in range(100)]
    for number, sketch in enumerate(sketches):
        neighbours.add(sketch, number % 3, float(number), 0.5)
    for number in (60, 75, 99):
        arms, values, weights = neighbours.nearest(sketches[number])
        assert values[0] == number and arms[0] == number % 3 and len(values) == 8
        assert weights[0] == pytest.approx(0.5) and (np.diff(weights) <= 0).all()
    assert min(neighbours.nearest(sketches[3])[1]) >= 60, "the earlier ones are forgotten"
    arms, values, weights = Neighbours().nearest(sketches[0])
    assert len(arms) == len(values) == len(weights) == 0
    assert not neighbours.sketch("").any()


class Timed(TreeCandidateGenerator):
    """An oracle that takes its time, on a clock of its own."""

    default_num_nodes = 4

    def __init__(self, oracle, clock, seconds):
        self.oracle, self.clock, self.seconds = oracle, clock, seconds

    def start(self, request_id, prompt):
        self.oracle.start(request_id, prompt)

    def propose(self, request_ids, max_nodes):
        self.clock.now += self.seconds
        return self.oracle.propose(request_ids, max_nodes)

    def observe(self, request_id, tokens):
        self.oracle.observe(request_id, tokens)

    def stop(self, request_id):
        self.oracle.stop(request_id)


class Clock:
    """Every look takes a millisecond."""

    now = 0.0

    def __call__(self):
        self.now += 0.001
        return self.now


@pytest.mark.parametrize("costly", [True, *exhaustive([False])])
def test_in_generate_the_better_drafter_serves_after_a_while(costly):
    """One drafter is always right, the other never: unless the first takes so long that it is not worth it."""
    model = enable(tiny_llama(eos_token_id=None))
    inputs, clock = prompts([6, 8]), Clock()
    plain = model.generate(**inputs, max_new_tokens=40)
    oracles = [Oracle(plain, inputs["attention_mask"], is_right) for is_right in (True, False)]
    drafters = {"right": Timed(oracles[0], clock, 1.0 if costly else 0.002), "wrong": Timed(oracles[1], clock, 0.002)}
    routed = RoutedCandidates(drafters, clock=clock)
    config = SmartSpecConfig(routed, num_nodes=4)
    for _ in range(12):
        assert model.generate(**inputs, max_new_tokens=40, assistant=config).tolist() == plain.tolist()
    before = routed.statistics()
    for _ in range(20):
        model.generate(**inputs, max_new_tokens=40, assistant=config)
    better = "wrong" if costly else "right"
    assert routed.statistics()[better].requests - before[better].requests >= 36
    found = routed.statistics()
    assert found["right"].mean_accepted_length > 4 and found["wrong"].mean_accepted_length == 1
    assert found[better].goodput == max(item.goodput for item in found.values())


def random_world(bandit, num, seed):
    rng, world = np.random.default_rng(seed), World(seed)
    for _ in range(num):
        kind = str(rng.choice(["", "ja", "code"]))
        sketch = bandit.neighbours.sketch(list(ARTICLES.values())[int(rng.integers(len(ARTICLES)))])
        world.serve(bandit, kind, {"a": 2.0, "b": 2.5}, {"a": 0.001, "b": 0.002}, sketch)


@pytest.mark.parametrize("num", [0, 40, 1100])
def test_a_bandit_that_is_saved_goes_on_as_it_would_have(tmp_path, num):
    path, first = tmp_path / "routed.npz", DrafterBandit(["a", "b"], seed=1)
    random_world(first, num, 0)
    first.save(path)
    second = DrafterBandit(["a", "b"], seed=2)
    second.load(path)
    for bandit in (first, second):
        random_world(bandit, 30, 5)
    assert first.kinds == second.kinds
    for kind in ("", "ja", "code"):
        assert first.goodput(kind) == second.goodput(kind)
        sketch = first.neighbours.sketch(ARTICLES["en"])
        for found, wanted in zip(second._judged("", sketch), first._judged("", sketch)):
            np.testing.assert_allclose(found, wanted)
    assert [first.choose("ja") for _ in range(20)] == [second.choose("ja") for _ in range(20)]


def test_what_was_saved_is_of_drafters_of_these_names(tmp_path):
    path, first = tmp_path / "routed.npz", DrafterBandit(["a", "b"])
    random_world(first, 60, 0)
    first.save(path)
    second = DrafterBandit(["new", "b"])
    second.load(path)
    assert second.goodput("ja")["b"] == pytest.approx(first.goodput("ja")["b"], rel=0.2)
    assert not second._general.counts[0] and second._general.counts[1] == first._general.counts[1]
    assert set(second.neighbours._arms[second.neighbours._weights > 0]) == {1}
    with pytest.raises(ValueError, match="it knows"):
        DrafterBandit(["c"]).load(path)


@pytest.mark.parametrize("content", [b"", b"nonsense"])
def test_files_that_hold_no_outcomes_are_refused_and_change_nothing(tmp_path, content):
    path, bandit = tmp_path / "routed.npz", DrafterBandit(["a", "b"])
    random_world(bandit, 10, 0)
    before = bandit.goodput("ja")
    path.write_bytes(content)
    with pytest.raises(ValueError, match="holds no outcomes"):
        bandit.load(path)
    with pytest.raises(FileNotFoundError):
        bandit.load(tmp_path / "none.npz")
    assert bandit.goodput("ja") == before


def test_a_bandit_that_cannot_be_written_leaves_the_file_before(tmp_path, monkeypatch):
    path, routed = tmp_path / "routed.npz", RoutedCandidates({"a": "suffix", "b": "none"})
    routed.save(path)
    kept = path.read_bytes()

    def fail(*args):
        raise OSError("no space")

    monkeypatch.setattr("hf_smartspec.files.os.replace", fail)
    with pytest.raises(OSError, match="no space"):
        routed.save(path)
    assert path.read_bytes() == kept and [item.name for item in tmp_path.iterdir()] == ["routed.npz"]
    routed.load(path)
