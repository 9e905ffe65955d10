"""Programs in peers' processes: the same tokens from all ways on torch, nothing kept, and llama.cpp's arguments."""

import sys
from types import SimpleNamespace

import pytest
import torch

import hf_smartspec
from benchmarks.decode.peers.files import write_files
from benchmarks.decode.peers.runners import smartspec, transformers
from hf_smartspec import Int4Linear
from hf_smartspec.commands.common.cost_matched import enlarge
from hf_smartspec.commands.common.models import load_model
from hf_smartspec.training.medusa import MedusaTraining
from tests.folders import save_tiny_models

PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 9, 8, 9]]


@pytest.fixture
def job(tmp_path):
    folder = save_tiny_models(tmp_path)
    target, draft = (load_model(str(folder / name)) for name in ("target", "draft"))
    large = enlarge(target, 3 * target.num_parameters())
    files = write_files(large, draft, ("model", "draft"), "float32", tmp_path / "files")
    return {
        "files": files, "kind": "float32", "prompts": PROMPTS, "num_tokens": 12, "threads": torch.get_num_threads(),
        "heads": [], "settings": {},
    }  # fmt: skip


def test_all_ways_on_torch_say_the_same_whole_rows(job, deprecated_by_itself):
    found = {}
    for runner in (transformers, smartspec):
        engine = runner.load(job)
        assert "torch" in engine.about
        for name, way in engine.ways.items():
            for rows in [PROMPTS[:1], PROMPTS][: 1 + way.in_batches]:
                way.prepare(len(rows))
                found[runner.__name__, name, len(rows)] = way.decode(rows, 12)
    assert len(found) == 4 + 2 * 4
    for (*_, num_rows), tokens in found.items():
        assert tokens == found[transformers.__name__, "plain", num_rows] and len(tokens[0]) == 12


def test_learned_drafters_are_ways_of_their_own(job, tmp_path):
    target = load_model(str(tmp_path / "target"))
    MedusaTraining(target, 2).heads.save_pretrained(tmp_path / "medusa")
    files = write_files(target, None, ("model",), "float32", tmp_path / "files")
    ways = smartspec.load(job | {"files": files, "heads": [str(tmp_path / "medusa")]}).ways
    assert ways["medusa"].in_batches
    assert ways["medusa"].decode(PROMPTS, 12) == ways["none"].decode(PROMPTS, 12)


def test_int8_has_plain_generate_on_the_same_weights(job):
    ways = smartspec.load(job | {"kind": "int8"}).ways
    # Levels are rounded from float32: in a longer text, the last bit of a norm may decide one, and a token.
    assert ways["generate on it"].decode(PROMPTS, 6) == ways["none"].decode(PROMPTS, 6)


def test_int4_computes_all_but_its_products_in_bfloat16(job, monkeypatch):
    models = []
    enable = hf_smartspec.enable
    monkeypatch.setattr(hf_smartspec, "enable", lambda model: models.append(model) or enable(model))
    ways = smartspec.load(job | {"kind": "int4"}).ways
    assert [len(tokens) for tokens in ways["none"].decode(PROMPTS, 12)] == [12] * len(PROMPTS)
    assert models[0].dtype == torch.bfloat16 and isinstance(models[0].model.layers[0].mlp.up_proj, Int4Linear)


def test_answers_are_forgotten_before_the_same_prompt_comes_again(job, monkeypatch):
    models = []
    enable = hf_smartspec.enable
    monkeypatch.setattr(hf_smartspec, "enable", lambda model: models.append(model) or enable(model))
    way = smartspec.load(job).ways["auto"]
    trees = hf_smartspec.suffix_trees(models[0])
    way.prepare(1)
    way.decode(PROMPTS[:1], 12)
    assert trees.num_cached_tokens()
    way.prepare(1)
    assert not trees.num_cached_tokens()


class FakeServer:
    """Says the last token of every prompt, as often as it is asked to."""

    def __init__(self, params):
        self.params = params

    def handle_completions(self, asked):
        self.asked = asked
        rows = asked["prompt"] if isinstance(asked["prompt"][0], list) else [asked["prompt"]]
        choices = [{"index": i, "text": f"<{row[-1]}>" * asked["n_predict"]} for i, row in enumerate(rows)]
        return {"choices": choices[::-1]}


class Params(SimpleNamespace):
    """Has every attribute."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, Params())
        return vars(self)[name]


def test_llama_cpp_gets_tokens_and_slots_and_its_numbers_are_read(job, monkeypatch):
    names = ("NONE", "DRAFT_SIMPLE", "NGRAM_SIMPLE", "NGRAM_MAP_K")
    fake = SimpleNamespace(
        __version__="1", CommonParams=Params, Server=FakeServer, get_system_info=lambda: "CPU : AVX = 1 | AMX = 0 |",
        ggml_type=SimpleNamespace(GGML_TYPE_F32="f32"),
        common_speculative_type=SimpleNamespace(**{f"COMMON_SPECULATIVE_TYPE_{name}": name for name in names}),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "xllamacpp", fake)
    from benchmarks.decode.peers.runners import llama_cpp

    monkeypatch.setattr(llama_cpp, "xllamacpp", fake)
    engine = llama_cpp.load(job | {"files": {"gguf": "a.gguf", "draft_gguf": "b.gguf"}})
    assert engine.about == "xllamacpp 1, kernels with AVX"
    assert set(engine.ways) == {"plain", "draft model", "ngram-simple", "ngram-map-k"}
    for way in engine.ways.values():
        for rows in (PROMPTS[:1], PROMPTS):
            way.prepare(len(rows))
            assert way.decode(rows, 3) == [[row[-1]] * 3 for row in rows]
    servers = engine.ways["draft model"].prepare.__self__.known
    params = servers[2].params
    assert servers[2].asked["prompt"] == PROMPTS and servers[1].asked["prompt"] == PROMPTS[0]
    assert not servers[1].asked["cache_prompt"] and servers[1].asked["ignore_eos"]
    assert params.n_parallel == 2 and params.n_ctx == 2 * servers[1].params.n_ctx and params.cache_type_k == "f32"
    assert params.speculative.types == ["DRAFT_SIMPLE"] and params.speculative.draft.mparams.path == "b.gguf"
