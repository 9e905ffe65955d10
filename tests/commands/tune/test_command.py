"""`smartspec tune`: the space it searches, the search, the file, and the command."""

import json

import numpy as np
import pytest

from hf_smartspec import SuffixTreeCandidates
from hf_smartspec.candidates import Datastore, FusedCandidates, SSSDCandidates
from hf_smartspec.candidates.combined.tuned import TunedSources
from hf_smartspec.commands import main as cli
from hf_smartspec.commands.common.arguments import UsageError
from hf_smartspec.commands.common.recordings import Recording
from hf_smartspec.commands.replay.sources import parse_specs
from hf_smartspec.commands.tune import command as tune
from hf_smartspec.commands.tune.arguments import Costs
from hf_smartspec.commands.tune.search import Requests, Search, Trial, num_requests, speed
from hf_smartspec.commands.tune.space import THRESHOLD, Parameter, build, calibrated, changed, space_of, value_of

from ...folders import byte_tokenizer, save_tiny_models
from ...generate.helpers import tiny_llama
from ..helpers import call

FREE = Costs(node=0.0, drafter=0.0)


def labels(*texts, num_nodes=None):
    return [parameter.label for parameter in space_of(texts, num_nodes).parameters]


# --- Space ------------------------------------------------------------------------------------------------------------


def test_everything_begins_at_the_source_s_defaults():
    (source,) = space_of(["suffix"]).default["sources"]
    assert source == {"name": "suffix", "options": {"min_probability": 0.1, "num_nodes": 16, "max_match": 16}}
    space = space_of(["suffix", "prompt_lookup"])
    fused = build(space.default)
    assert isinstance(fused, FusedCandidates) and fused.default_num_nodes == 16
    assert space.default["fused"]["discounts"] == [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    for parameter in space.parameters:
        assert value_of(space.default, parameter) in parameter.values


def test_short_matches_are_discounted_where_sources_know_their_lengths():
    found = [label for label in labels("suffix", "prompt_lookup") if label.endswith("short matches")]
    assert found == ["prompt_lookup discount, short matches"]
    space = space_of(["suffix", "prompt_lookup"])
    parameter = next(item for item in space.parameters if item.label == found[0])
    assert build(changed(space.default, parameter, 0.5)).discounts[1].short == 0.5


def test_given_options_stay():
    assert labels("suffix:max_match=8,min_probability=0.2") == ["suffix num_nodes"]
    assert labels("suffix:scoring=counts")[-2:] == ["suffix factor", "suffix offset"]
    assert "prompt_lookup num_tokens" not in labels("prompt_lookup", num_nodes=3)
    assert space_of(["prompt_lookup"], 3).default["sources"][0]["options"]["num_tokens"] == 3
    assert "num_nodes" not in labels("suffix", "prompt_lookup", num_nodes=3)
    assert space_of(["suffix", "prompt_lookup"], 3).default["fused"]["num_nodes"] == 3


def test_datastores_are_named_by_absolute_paths(tmp_path, monkeypatch):
    Datastore.from_documents([[1, 2, 3, 1, 2, 4]], vocab_size=9).save(tmp_path / "store")
    monkeypatch.chdir(tmp_path)
    space = space_of(["datastore:store", "suffix"])
    assert space.default["sources"][0]["options"]["datastore"] == str(tmp_path / "store")
    assert "datastore max_prefix" in [parameter.label for parameter in space.parameters]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["fused"], "'fused' cannot be tuned"),
        (["suffix:speed=3"], "speed"),
        (["suffix:max_match=99"], "max_match"),
        (["suffix", "suffix"], "'suffix' once at most"),
        (["datastore"], "datastore"),
        (["datastore:/nowhere"], "nowhere"),
    ],
)
def test_what_cannot_be_tuned_is_refused(texts, message):
    with pytest.raises(UsageError, match=message):
        space_of(texts)


def test_changes_leave_the_original():
    space = space_of(["suffix", "prompt_lookup"])
    for parameter in [*space.parameters, THRESHOLD]:
        before = json.dumps(space.default)
        other = changed(space.default, parameter, 0.123)
        assert value_of(other, parameter) == 0.123 and json.dumps(space.default) == before


# --- Search -----------------------------------------------------------------------------------------------------------


def test_speed_weighs_tokens_by_what_they_cost():
    counts = np.array([[10, 4, 20, 6, 5], [2, 1, 0, 1, 0]])
    assert speed(counts, FREE) == pytest.approx(12 / 5)
    assert speed(counts, Costs(node=0.1, drafter=0.2)) == pytest.approx(12 / (5 + 2 + 1))


def repeating(num_requests, seed=0):
    """Responses that repeat a period of 6 tokens: drafts of any length come true, long ones cost fewest steps."""
    rng = np.random.default_rng(seed)
    periods = [rng.permutation(50)[:6] for _ in range(num_requests)]
    return [Recording(np.tile(period, 3), np.tile(period, 8)) for period in periods]


def random_texts(num_requests, seed=0):
    """Nothing comes true, and prompts suggest something all the time: the shortest drafts are best."""
    rng = np.random.default_rng(seed)
    return [Recording(rng.integers(0, 4, 60), rng.integers(0, 4, 40) + 4 * (i % 2)) for i in range(num_requests)]


LENGTH = Parameter("num_tokens", ("sources", 0, "options", "num_tokens"), (2, 5, 10, 16, 32))


@pytest.mark.parametrize(("texts", "costs", "expected"), [(repeating, FREE, 32), (random_texts, Costs(0.3), 2)])
def test_the_best_value_wins(texts, costs, expected):
    search = Search(space_of(["prompt_lookup"]).default, [Requests("a", texts(8), 6)], costs)
    before = search.value
    assert list(search.run([LENGTH])) == [LENGTH]
    assert value_of(search.best.choice, LENGTH) == expected and search.value > before
    assert search.best.num_done == [6], "nothing that is held out was looked at"


def test_searches_descend_until_nothing_changes_and_count_their_requests():
    space, counted = space_of(["prompt_lookup"]), []
    data = [Requests("a", repeating(6), 4), Requests("b", repeating(5, seed=1), 5)]
    search = Search(space.default, data, Costs(), progress=counted.append)
    seen = [parameter.label for parameter in search.run(space.parameters)]
    assert seen[: len(space.parameters)] == [parameter.label for parameter in space.parameters]
    assert sum(counted) <= num_requests(data, space.parameters)
    assert sum(counted) == 9 * (1 + sum(len(p.values) - 1 for p in space.parameters for x in seen if x == p.label))


def test_values_that_do_not_fit_together_are_passed_over():
    space = space_of(["prompt_lookup:max_ngram=2"])
    shortest = next(parameter for parameter in space.parameters if parameter.path[-1] == "min_ngram")
    search = Search(space.default, [Requests("a", repeating(4), 4)], Costs())
    list(search.run([shortest]))  # 3 exceeds `max_ngram`
    assert value_of(search.best.choice, shortest) <= 2


def test_trials_count_what_the_draft_model_drafts():
    draft = tiny_llama()
    texts = [Recording(text.prompt % 30, text.response % 30) for text in random_texts(3)]
    space = space_of(["prompt_lookup"], 4)
    always, never = (
        Trial(changed(space.default, THRESHOLD, value), [Requests("a", texts, 2)], draft) for value in (99.0, 0.0)
    )
    for trial in (always, never):
        trial.advance([3], lambda number: None)
        assert (trial.counts[0][:, 4] <= trial.counts[0][:, 2]).all()
        assert trial.counts[0][:, 0].tolist() == [40] * 3
    assert (always.counts[0][:, 4] == always.counts[0][:, 2]).all() and always.counts[0][:, 4].min() > 0
    assert never.counts[0][:, 4].sum() < always.counts[0][:, 4].sum()


@pytest.mark.parametrize("costs", [FREE, Costs(node=0.02, drafter=0.9)])
def test_no_threshold_is_better_than_the_one_that_is_found(costs):
    data = [Requests("a", [Recording(text.prompt % 30, text.response % 30) for text in repeating(4)], 4)]
    default, draft = space_of(["prompt_lookup"], 4).default, tiny_llama()
    search = Search(default, data, costs, draft)
    list(search.run([THRESHOLD]))
    for value in (0.0, 1.0, 5.0):
        trial = Trial(changed(default, THRESHOLD, value), data, draft)
        trial.advance([4], lambda number: None)
        assert trial.value([4], costs) <= search.value * 1.0011


# --- Command ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Two files of responses that resemble one another, and a tokenizer."""
    folder = tmp_path_factory.mktemp("texts")
    byte_tokenizer().save_pretrained(folder / "tokenizer")
    for name in ("a", "b"):
        rows = [{"prompt": f"{name}{i}: ", "response": f"the {name} and the {i % 3} of the {name}"} for i in range(10)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def tune_texts(texts, tmp_path, *arguments):
    files = texts / "a.jsonl", texts / "b.jsonl"
    common = ("--tokenizer", texts / "tokenizer", "--output", tmp_path / "tuned.json")
    return call("tune", *files, *common, *arguments)


def test_command_writes_what_replay_loads(texts, tmp_path, capsys):
    sources = ("--sources", "prompt_lookup", "suffix:max_match=8,min_probability=0.1,max_bytes=1000000", "--nodes", "6")
    assert tune_texts(texts, tmp_path, *sources, "--json", tmp_path / "report.json") == 0
    out = capsys.readouterr().out
    assert "held out" in out and "geometric mean" in out and "prompt_lookup max_ngram" in out
    tuned = TunedSources.load(tmp_path / "tuned.json")
    assert [source.name for source in tuned.sources] == ["prompt_lookup", "suffix"]
    assert tuned.sources[1].options == {"max_match": 8, "min_probability": 0.1, "max_bytes": 1000000}
    assert tuned.fused["num_nodes"] == 6 and tuned.found["is_complete"]
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(report["rows"]) == 4
    assert report["mean_gain"]["training"] >= 1 - 1e-9, "no choice that is worse where it was made"
    (spec,) = parse_specs(f"tuned:{tmp_path / 'tuned.json'}")
    assert spec.build().default_num_nodes == 6
    arguments = (texts / "a.jsonl", "--tokenizer", texts / "tokenizer", "--sources", spec.text)
    assert call("replay", *arguments, "--json", tmp_path / "replay.json") == 0
    replayed = json.loads((tmp_path / "replay.json").read_text())["data_sets"][str(texts / "a.jsonl")][spec.text]
    rows = [row["tuned"]["tokens_per_step"] for row in report["rows"] if row["data_set"].endswith("a.jsonl")]
    assert min(rows) <= replayed["tokens_per_step"] <= max(rows), "the same source on the same requests"


def test_command_takes_a_draft_model(texts, tmp_path, capsys):
    folder = save_tiny_models(tmp_path / "models")
    sources = ("--sources", "prompt_lookup:max_ngram=2,min_ngram=1,num_tokens=4", "--limit", "4")
    assert tune_texts(texts, tmp_path, *sources, "--drafter", folder / "draft", "--drafter-cost", "0.9") == 0
    assert TunedSources.load(tmp_path / "tuned.json").found["drafter_cost"] == 0.9
    assert "those of the draft model 0.9 more" in " ".join(capsys.readouterr().out.split())


def test_interrupted_the_best_so_far_is_kept(texts, tmp_path, capsys, monkeypatch):
    before = Search._race
    races = []

    def race(self, parameter):
        if len(races) == 2:
            raise KeyboardInterrupt
        races.append(parameter)
        before(self, parameter)

    monkeypatch.setattr(Search, "_race", race)
    assert tune_texts(texts, tmp_path) == cli.INTERRUPTED
    tuned = TunedSources.load(tmp_path / "tuned.json")
    assert not tuned.found["is_complete"] and isinstance(tuned.sources[0].build(), SuffixTreeCandidates)
    assert "interrupted; the best options so far" in capsys.readouterr().out


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_stopped_early_an_earlier_file_stays(texts, tmp_path, capsys, monkeypatch, error):
    def race(self, parameter):
        raise error

    path = tmp_path / "tuned.json"
    path.write_text("what was tuned before")
    monkeypatch.setattr(Search, "_race", race)
    if error is KeyboardInterrupt:
        assert tune_texts(texts, tmp_path) == cli.INTERRUPTED
    else:
        with pytest.raises(error):
            tune_texts(texts, tmp_path)
    assert path.read_text() == "what was tuned before"
    assert "the best options" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sources", "arctic"], "cannot be tuned"),
        (["--held-out", "1"], "between 0 and 1"),
        (["--held-out", "x"], "is no number"),
        (["--node-cost", "-1"], "at least 0"),
        (["--limit", "1"], "too few to hold some out"),
        (["--output", "/nowhere/tuned.json"], "no such folder"),
    ],
)
def test_bad_arguments_are_refused_before_any_work(texts, tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(tune, "_search", None)
    assert tune_texts(texts, tmp_path, *arguments) == 2
    assert message in capsys.readouterr().err


def test_sssd_s_weights_are_searched_and_calibrated_on_the_text(texts, tmp_path):
    """SSSD, section 3.1.3: a grid search over weights, and calibration by source, depth and match length."""
    Datastore.from_documents([np.arange(40)]).save(path := tmp_path / "text.datastore")
    given = f"sssd:datastore={path},num_nodes=4,deep=1.0,breadth=1,min_continuations=1"
    space, text = space_of([given]), np.tile([5, 6, 7], 9)
    *searched, measured = calibrated(space, [(text, text)]).parameters
    assert [parameter.label for parameter in searched] == ["sssd scale", "sssd short"]
    factors = build(space.default).calibrate([(text, text)])
    assert measured.values == (None, factors) and set(factors) == {"input", "datastore"}
    assert build(changed(space.default, measured, factors)).discounts[0].factors == factors["input"]
    assert tune_texts(texts, tmp_path, "--sources", given, "--limit", "4") == 0
    (spec,) = parse_specs(f"tuned:{tmp_path / 'tuned.json'}")
    assert isinstance(spec.build(), SSSDCandidates)
    (found,) = TunedSources.load(tmp_path / "tuned.json").sources
    assert {"scale", "short"} <= set(found.options)


def test_a_calibration_outlives_its_file(tmp_path):
    source = SSSDCandidates(max_prefix=2)
    text = np.tile([5, 6, 7], 9)
    factors = source.calibrate([(text, text)])
    options = {"max_prefix": 2, "calibration": factors}
    TunedSources.of({"sources": [{"name": "sssd", "options": options}], "fused": {}}).save(tmp_path / "tuned.json")
    (spec,) = parse_specs(f"tuned:{tmp_path / 'tuned.json'}")
    assert spec.build().discounts == SSSDCandidates(max_prefix=2, calibration=factors).discounts
