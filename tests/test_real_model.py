"""The promise on a model that people use: steep logits, a large vocabulary, text that does not loop."""

import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessorList
from transformers.generation.logits_process import TemperatureLogitsWarper, TopPLogitsWarper

import hf_smartspec
from hf_smartspec import Engine, SeededGumbelLogitsProcessor
from hf_smartspec.candidates import build_datastore
from hf_smartspec.commands.common import real_model as files

from . import real_model as fetching
from .covering import IS_EXHAUSTIVE, exhaustive, part_of
from .serving.helpers import Asked, check_all

# What people send: questions, an edit that mostly copies, and code to go on with, which has no template.
_TEXT = "The committee meets on Tuesday at nine in the small hall. Please bring the signed forms and two copies of it."
_CHATS = (
    "What is the capital of France, and what is it known for?",
    "Explain in two sentences why the sky is blue.",
    f"Rewrite this with Friday in place of Tuesday, and change nothing else: {_TEXT}",
)
_RAW = "def is_prime(n):\n    "
NEW, END = 32 if IS_EXHAUSTIVE else 16, 2
# By these and the seed of `sampled` the two best scores are 0.01 apart or more, everywhere: rounding changes no token.
SAMPLING = {"temperature": 0.7, "top_p": 0.9}


def _random_draft():
    """A draft model that is never right, as small as its vocabulary lets it be."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=49152, tie_word_embeddings=True, **sizes)).eval()


# What drafts: of a function that gets the folder of a datastore, so that every test has a source of its own.
SOURCES = {
    "auto": lambda folder: "auto",  # first, with nothing remembered
    "none": lambda folder: "none",
    "prompt_lookup": lambda folder: "prompt_lookup",
    "suffix": lambda folder: "suffix",
    "datastore": lambda folder: f"datastore:{folder}",
    "early_exit": lambda folder: "early_exit:1",
    "draft": lambda folder: _random_draft(),
    "list": lambda folder: ["prompt_lookup", f"datastore:{folder}", _random_draft()],
}
ARE_RIGHT = {"prompt_lookup", "suffix", "auto", "datastore", "list"}  # for some of the tokens


@pytest.fixture(scope="module")
def prompts(real_tokenizer):
    """Every prompt's tokens."""
    messages = [[{"role": "user", "content": text}] for text in _CHATS]
    chats = real_tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    return [*chats, real_tokenizer(_RAW).input_ids]


@pytest.fixture(scope="module")
def inputs(real_tokenizer, prompts):
    """All of them as one batch, padded on the left."""
    return dict(real_tokenizer.pad({"input_ids": prompts}, return_tensors="pt"))


def _processors(seed):
    """What `do_sample=True` with a seed adds in transformers, and the noise."""
    warpers = [TemperatureLogitsWarper(SAMPLING["temperature"]), TopPLogitsWarper(SAMPLING["top_p"])]
    return LogitsProcessorList([*warpers, SeededGumbelLogitsProcessor(seed)])


@pytest.fixture(scope="module")
def greedy(real_model, inputs):
    return real_model(torch.float32).generate(**inputs, max_new_tokens=NEW, do_sample=False)


@pytest.fixture(scope="module")
def sampled(real_model, inputs):
    model, processors = real_model(torch.float32), _processors(seed=3)
    return model.generate(**inputs, max_new_tokens=NEW, do_sample=False, logits_processor=processors)


@pytest.fixture(scope="module")
def datastore(greedy, prompts, tmp_path_factory):
    """A text that resembles the answers: their second half."""
    path = tmp_path_factory.mktemp("real") / "answers.datastore"
    build_datastore([row[-NEW // 2 :].tolist() for row in greedy], path)
    return path


@pytest.mark.parametrize("name", part_of(SOURCES, "auto", "draft"))
def test_greedy_rows_have_the_plain_tokens(name, real_model, inputs, greedy, datastore):
    model = real_model(torch.float32)
    with hf_smartspec.enabled(model):
        actual = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, assistant=SOURCES[name](datastore))
        done = model.smartspec_statistics.last
    assert torch.equal(actual, greedy)
    assert (done.drafted_tokens > 0) == (name != "none")
    assert done.accepted_tokens > 0 or name not in ARE_RIGHT


@pytest.mark.parametrize("name", part_of(SOURCES, "list"))
def test_sampled_rows_have_the_plain_tokens(name, real_model, inputs, sampled, datastore):
    model = real_model(torch.float32)
    settings = SAMPLING | {"do_sample": True, "top_k": 0, "seed": 3, "max_new_tokens": NEW}
    with hf_smartspec.enabled(model):
        actual = model.generate(**inputs, **settings, assistant=SOURCES[name](datastore))
        done = model.smartspec_statistics.last
    assert torch.equal(actual, sampled)
    assert (done.drafted_tokens > 0) == (name != "none")
    assert done.accepted_tokens > 0 or name not in ARE_RIGHT


def _generated(row):
    """Tokens of a row up to its end, included."""
    tokens = row[-NEW:].tolist()
    return tokens[: tokens.index(END) + 1] if END in tokens else tokens


@pytest.mark.adaptive
@pytest.mark.parametrize("row", [1, 2])
def test_a_row_by_itself_has_the_plain_tokens(row, real_model, prompts, greedy):
    """The auction decides how much is drafted; the row is not padded."""
    model, ids = real_model(torch.float32), torch.tensor([prompts[row]])
    with hf_smartspec.enabled(model):
        actual = model.generate(ids, max_new_tokens=NEW, do_sample=False, assistant=["prompt_lookup", _random_draft()])
        done = model.smartspec_statistics.last
    assert actual[0, ids.shape[1] :].tolist() == _generated(greedy[row])
    assert done.drafted_tokens > 0
    assert done.accepted_tokens > 0 or row != 2, "the edit is copied"


@pytest.mark.parametrize("name", ["auto", *exhaustive(["list"])])
def test_requests_in_flight_have_the_plain_tokens(name, real_model, prompts, greedy, sampled, datastore):
    """Nine at once, of which three run; prompts are read in parts."""
    model, limit = real_model(torch.float32), {"max_new_tokens": NEW}
    requests = [Asked(prompt, limit | {"do_sample": False}) for prompt in prompts]
    expected = [_generated(row) for row in greedy]
    # The noise of a batch's first row is that of its request alone.
    requests.append(Asked(prompts[0], limit | SAMPLING | {"do_sample": True, "top_k": 0}, seed=3))
    expected.append(_generated(sampled[0]))
    with Engine(model, SOURCES[name](datastore), max_batch_size=3, max_prefill_tokens=48) as engine:
        check_all(engine, model, requests + requests[:4], expected + expected[:4])
    statistics = engine.statistics
    assert statistics.steps > statistics.forwards, "some of them ran at once"
    assert 0 < statistics.accepted_tokens < statistics.drafted_tokens


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "CACHE", tmp_path)
    monkeypatch.setattr(files, "FOLDER", tmp_path / files.NAME)
    monkeypatch.setattr(files, "FILE", tmp_path / files.GGUF)
    monkeypatch.setattr(files, "find_spec", lambda name: name == "gguf" or None)


@pytest.fixture
def converted(monkeypatch):
    """Files that were converted."""
    found = []

    def convert(file):
        found.append(file)
        time.sleep(0.05)  # long enough for the others to come
        files.FOLDER.mkdir()

    monkeypatch.setattr(files, "_convert", convert)
    return found


def test_the_model_is_converted_once(empty_cache, converted):
    assert files.real_model() is None and not converted
    files.FILE.touch()
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: files.real_model(), range(4))) == {str(files.FOLDER)}
    assert converted == [files.FILE]


def test_the_file_of_an_installed_wheel_is_found_and_none_is_read_without_gguf(empty_cache, converted, monkeypatch):
    package = files.CACHE / "site-packages" / files.PACKAGE
    package.mkdir(parents=True)
    (package / files.GGUF).touch()
    installed = {files.PACKAGE: SimpleNamespace(submodule_search_locations=[str(package)])}
    monkeypatch.setattr(files, "find_spec", installed.get)
    assert files.real_model() is None
    installed["gguf"] = SimpleNamespace()
    assert files.real_model() == str(files.FOLDER) and converted == [package / files.GGUF]


def test_where_it_cannot_be_fetched_one_line_says_so(empty_cache, monkeypatch, capsys):
    def run(*command, **_):
        raise subprocess.CalledProcessError(1, command, stderr="WARNING: Retrying\nERROR: No matching distribution\n")

    monkeypatch.setattr(subprocess, "run", run)
    fetching.main()
    _, line = capsys.readouterr().out.splitlines()
    assert "skipped: ERROR: No matching distribution" in line and files.real_model() is None
