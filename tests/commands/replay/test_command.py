"""`smartspec replay`: what it reads, its sources by specification, and the command."""

import gzip
import json
import sys

import numpy as np
import pytest

from hf_smartspec import PromptLookupCandidates
from hf_smartspec.commands import main as cli
from hf_smartspec.commands.common.arguments import UsageError
from hf_smartspec.commands.common.recordings import Fields, Texts, read_requests, tokenize
from hf_smartspec.commands.replay.sources import parse_specs

from ...folders import byte_tokenizer

PAIRS = [
    {"prompt": "say ab: ", "response": "ababababab"},
    {"prompt": "count: ", "response": "one two one two three"},
    {"prompt": "again: ", "response": "one two one two three"},
    {"prompt": "nothing: ", "response": ""},
    {"prompt": "bye", "response": "x"},
]


# --- Data -------------------------------------------------------------------------------------------------------------


def write(path, rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.jsonl.gz"])
def test_pairs_are_read_in_order_without_empty_responses(tmp_path, name):
    path = write(tmp_path / name, PAIRS)
    texts = read_requests(path, Fields(), limit=None)
    assert [item.response for item in texts] == [row["response"] for row in PAIRS if row["response"]]
    assert texts[0] == Texts(["say ab: "], "ababababab")
    assert read_requests(path, Fields(), limit=2) == texts[:2]


TURNS = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "U"},
    {"role": "assistant", "content": "A", "tool_calls": ""},
    {"role": "tool", "content": "T"},
    {"role": "assistant", "content": None, "tool_calls": '[{"f": 1}]'},
    {"role": "assistant", "content": ""},
    {"role": "user", "content": "V"},
    {"role": "assistant", "content": "B", "tool_calls": "[2]"},
]


@pytest.mark.parametrize("turns", ["all", "last", "none"])
def test_every_assistant_turn_is_a_request(tmp_path, turns):
    path = write(tmp_path / "turns.jsonl", [{"prompt": "P", "response": "R", "turns": TURNS}])
    found = read_requests(path, Fields(turns=turns), limit=None)
    expected = [
        Texts(["S", "U"], "A"),
        Texts(["S", "U", "A", "T"], '[{"f": 1}]'),
        Texts(["S", "U", "A", "T", '[{"f": 1}]', "", "V"], "B\n[2]"),
    ]
    assert found == {"all": expected, "last": expected[-1:], "none": [Texts(["P"], "R")]}[turns]


def test_long_prompts_lose_their_beginning():
    tokenizer = byte_tokenizer()
    (item,) = tokenize([Texts(["abc", "def"], "gh")], tokenizer, max_prompt=6)
    assert tokenizer.decode(item.prompt) == "c\ndef\n" and tokenizer.decode(item.response) == "gh"
    assert item.prompt.dtype == item.response.dtype == np.int64


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "row 1 is no JSON"),
        ("[1]", "row 1 is no JSON object"),
        ('{"prompt": "a"}', 'no text under "response"'),
        ('{"prompt": 1, "response": "a"}', 'no text under "prompt"'),
        ('{"turns": ["a"]}', '"turns" must be'),
        ('{"prompt": "a", "response": ""}', "holds no responses"),
        ("", "holds no responses"),
    ],
)
def test_unreadable_files_are_refused(tmp_path, content, message):
    path = tmp_path / "file.jsonl"
    path.write_text(content)
    with pytest.raises(UsageError, match=message):
        read_requests(path, Fields(), limit=None)


def test_missing_and_broken_files_are_refused(tmp_path):
    (tmp_path / "broken.gz").write_bytes(b"no gzip")
    for name in ("missing.jsonl", "broken.gz"):
        with pytest.raises(UsageError, match="cannot read"):
            read_requests(tmp_path / name, Fields(), limit=None)


# --- Sources ----------------------------------------------------------------------------------------------------------


def test_specifications_name_sources_options_and_nodes():
    (plain,) = parse_specs("prompt_lookup")
    assert plain.num_nodes is None and isinstance(plain.build(), PromptLookupCandidates)
    three = parse_specs("prompt_lookup:7,max_ngram=2@1,4,8")
    assert [(spec.name, spec.num_nodes) for spec in three] == [("prompt_lookup", number) for number in (1, 4, 8)]
    assert three[1].text == "prompt_lookup:7,max_ngram=2@4"
    assert (three[0].build().default_num_nodes, three[0].build().max_ngram) == (7, 2)
    (named,) = parse_specs("hf_smartspec.candidates:PromptLookupCandidates(max_ngram=5)@3")
    assert named.build().max_ngram == 5 and named.num_nodes == 3
    (bare,) = parse_specs("hf_smartspec.candidates:PromptLookupCandidates")
    assert bare.build().max_ngram == 3 and bare.name == "PromptLookupCandidates"
    assert parse_specs("hf_prompt_lookup:max_ngram=3")[0].build().generator.max_matching_ngram_size == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "unknown source"),
        ("prompt_lookup@0", "must be positive"),
        ("prompt_lookup@a", "must be positive"),
        ("no.such.module:Class", "cannot import"),
        ("hf_smartspec:NoSuchClass", "cannot import"),
        ("hf_smartspec.candidates:PromptLookupCandidates(1", "cannot read the options"),
        ("hf_smartspec.candidates:PromptLookupCandidates(max_ngram=print)", "cannot read the options"),
        ("prompt_lookup:no_such_option=1", "cannot make the source"),
        ("prompt_lookup:max_ngram=0", "max_ngram"),
    ],
)
def test_bad_specifications_are_refused(text, message):
    with pytest.raises(UsageError, match=message):
        for spec in parse_specs(text):
            spec.build()


class FakeCache:
    """What `ArcticCandidates` uses of ArcticInference's cache."""

    def __init__(self, max_tree_depth, max_cached_requests):
        self.calls = [max_tree_depth, max_cached_requests]

    def start_request(self, name, prompt):
        self.calls.append(("start", name, prompt.dtype, prompt.tolist()))

    def speculate(self, name, context, **options):
        self.calls.append(("speculate", name, context.tolist(), options))
        return type(
            "Draft", (), {"token_ids": [4, 5, 6], "parents": [-1, 0, 0], "probs": [0.5, 0.25, 0.1], "match_len": 3}
        )

    def add_active_response(self, name, tokens):
        self.calls.append(("add", name, tokens.dtype, tokens.tolist()))

    def stop_request(self, name):
        self.calls.append(("stop", name))


@pytest.fixture
def fake_arctic(monkeypatch):
    module = type("Module", (), {"SuffixDecodingCache": FakeCache})
    monkeypatch.setitem(sys.modules, "arctic_inference.suffix_decoding", module)


def test_arctic_is_asked_as_its_own_simulator_asks(fake_arctic):
    source = parse_specs("arctic:factor=2,offset=1,max=5,tree=1,prob=0.2,depth=4")[0].build()
    source.start("a", np.arange(6))
    (tree,) = source.propose(["a"], [source.default_num_nodes])
    assert tree.probs == pytest.approx([0.5, 0.5, 0.2]) and tree.match_lengths == 3
    tree.check_integrity(10)
    source.observe("a", np.array([7, 8]))
    source.propose(["a"], [2])
    source.stop("a")
    source.stop("a")
    options = {"max_spec_factor": 2.0, "max_spec_offset": 1.0, "min_token_prob": 0.2, "use_tree_spec": True}
    assert source._cache.calls == [
        4,
        -1,
        ("start", "a", np.int32, list(range(6))),
        ("speculate", "a", [2, 3, 4, 5], {"max_spec_tokens": 5, **options}),
        ("add", "a", np.int32, [7, 8]),
        ("speculate", "a", [4, 5, 7, 8], {"max_spec_tokens": 2, **options}),
        ("stop", "a"),
    ]


def test_a_missing_arctic_is_explained(monkeypatch):
    monkeypatch.setitem(sys.modules, "arctic_inference.suffix_decoding", None)
    with pytest.raises(UsageError, match="pip install arctic-inference"):
        parse_specs("arctic")[0].build()


# --- The command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def smartspec(monkeypatch, tmp_path, capsys):
    """Calls the command on a file of pairs, with a tokenizer of bytes; returns (status, out, err)."""
    monkeypatch.setitem(cli.COMMANDS, ("replay",), cli.Command("replay.command", "replay recorded responses"))
    monkeypatch.setenv("COLUMNS", "200")
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    write(tmp_path / "pairs.jsonl.gz", PAIRS)

    def call(*arguments, files=(tmp_path / "pairs.jsonl.gz",)):
        words = ["replay", *files, "--tokenizer", tmp_path / "tokenizer", *arguments]
        try:
            status = cli.main([str(word) for word in words])
        except SystemExit as error:
            status = error.code
        return status, *capsys.readouterr()

    return call


def test_the_command_prints_and_writes_everything(smartspec, tmp_path):
    path = tmp_path / "report.json"
    sources = ("--sources", "prompt_lookup@1,4", "hf_prompt_lookup")
    status, out, _ = smartspec(*sources, "--against", "hf_prompt_lookup", "--entropy", "--json", path)
    assert status == 0
    assert "4 requests" in out and "Empirical entropy" in out and "geometric mean" in out
    report = json.loads(path.read_text())
    (results,) = report["data_sets"].values()
    assert list(results) == ["prompt_lookup@1", "prompt_lookup@4", "hf_prompt_lookup"]
    for numbers in results.values():
        assert numbers["generated_tokens"] == sum(len(row["response"]) for row in PAIRS)
        # Every step yields what was accepted and one token more, but the last one of a response at times.
        assert 0 <= numbers["steps"] + numbers["accepted_tokens"] - numbers["generated_tokens"] <= numbers["requests"]
    assert report["against_mean"]["prompt_lookup"] > 0 and report["command"]["batch_size"] == 1
    assert next(iter(report["entropy_bits"].values())) > 0
    (lengths,) = report["lengths"].values()
    for part, more in (("prompt", 1), ("response", 0)):  # a line break after the prompt
        sizes = [len(row[part]) + more for row in PAIRS if row["response"]]
        assert lengths[part] == pytest.approx({"mean": np.mean(sizes), "std": np.std(sizes)})


def test_entropy_alone_replays_nothing(smartspec):
    status, out, _ = smartspec("--entropy", "2")
    assert status == 0 and "Empirical entropy" in out and "prompt_lookup" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--sources", "nonsense"), "unknown source"),
        (("--sources", "prompt_lookup", "prompt_lookup"), "named twice"),
        (("--against", "arctic"), "none of the sources"),
        (("--limit", "0"), "at least 1"),
        (("--json", "/no/such/folder/file"), "cannot write"),
        (("--turns", "some"), "invalid choice"),
        (("--response-field", "answer"), 'no text under "answer"'),
    ],
)
def test_bad_arguments_are_refused(smartspec, arguments, message):
    status, _, err = smartspec(*arguments)
    assert status == 2 and message in err and err.count("\n") <= 2


def test_bad_files_and_tokenizers_are_refused(smartspec, tmp_path):
    status, _, err = smartspec(files=[tmp_path / "missing.jsonl"])
    assert status == 2 and "cannot read" in err
    status, _, err = smartspec("--tokenizer", tmp_path)
    assert status == 2 and "cannot load a tokenizer" in err


def test_a_missing_matplotlib_is_explained(smartspec, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, _, err = smartspec("--plot", tmp_path / "plot.png")
    assert status == 2 and "pip install matplotlib" in err


def test_figures_are_drawn(smartspec, tmp_path):
    pytest.importorskip("matplotlib", reason="figures are optional")
    path = tmp_path / "plot.png"
    status, _, _ = smartspec("--plot", path)
    assert status == 0 and path.read_bytes().startswith(b"\x89PNG")


class Interrupting(PromptLookupCandidates):
    """As if Ctrl-C were pressed in the second request."""

    def begin(self, request):
        super().begin(request)
        if request.request_id == 1:
            raise KeyboardInterrupt


def test_interrupted_what_was_measured_is_shown(smartspec, tmp_path):
    path = tmp_path / "report.json"
    spec = f"{__name__}:Interrupting"
    status, out, err = smartspec("--sources", spec, "--json", path)
    assert status == cli.INTERRUPTED and "interrupted" in err
    assert "1 requests" in out
    (results,) = json.loads(path.read_text())["data_sets"].values()
    assert results[spec]["requests"] == 1
