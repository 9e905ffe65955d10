"""Draft models are loaded once for a target, with every weight, and nobody else waits for it."""

import threading

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_smartspec import suffix_trees
from hf_smartspec.prepare import draft_models
from hf_smartspec.prepare.draft_models import Tokenizers, load_drafter, load_whole, vocabulary_between
from hf_smartspec.target_model.model_state import warn_once

from ..models import new_model
from ..serving.helpers import TIMEOUT


class Load:
    """One that has begun, and goes on when it is told to."""

    def __init__(self):
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self, *args):
        self.has_begun.set()
        assert self.may_end.wait(TIMEOUT)
        return self


WAYS = {
    "draft model": ("_load", lambda model: load_drafter("folder", model)),
    "tokenizers": ("_compare", lambda model: vocabulary_between(new_model("llama", vocab_size=96), model)),
}


@pytest.mark.parametrize("way", WAYS)
def test_nobody_else_waits_for_files_that_are_loaded(way, monkeypatch):
    model, load, found = new_model("llama"), Load(), []
    name, call = WAYS[way]
    monkeypatch.setattr(draft_models, name, load)
    thread = threading.Thread(target=lambda: found.append(call(model)))
    thread.start()
    assert load.has_begun.wait(TIMEOUT)
    warn_once(model, "a warning")
    assert suffix_trees(model) is suffix_trees(model)
    load.may_end.set()
    thread.join(TIMEOUT)
    assert found == [load]


def test_who_asks_for_a_vocabulary_meanwhile_gets_what_is_found(monkeypatch):
    model, draft, load, found = new_model("llama"), new_model("llama", vocab_size=96), Load(), []
    answers = iter([load, lambda *args: "the first thread's is not used", lambda *args: 3])
    monkeypatch.setattr(draft_models, "_compare", lambda *args: next(answers)(*args))
    threads = [threading.Thread(target=lambda: found.append(vocabulary_between(draft, model))) for _ in range(2)]
    threads[0].start()
    assert load.has_begun.wait(TIMEOUT)
    threads[1].start()
    load.may_end.set()
    for thread in threads:
        thread.join(TIMEOUT)
    assert found == [load, load]
    next(answers)
    assert vocabulary_between(draft, model, Tokenizers("another")) == 3


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_that_are_no_numbers_are_named(tmp_path, dtype, number):
    new_model("llama").to(dtype).save_pretrained(tmp_path)
    assert load_whole(AutoModelForCausalLM, str(tmp_path), dtype=dtype).dtype == dtype
    tensors, name = load_file(tmp_path / "model.safetensors"), "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 2:4] = number
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    message = rf"`{name}` is damaged: 2 of its {tensors[name].numel()} numbers are NaN or infinite"
    with pytest.raises(ValueError, match=message):
        load_whole(AutoModelForCausalLM, str(tmp_path), dtype=dtype)
    with pytest.raises(ValueError, match=rf"holds no draft model that can be loaded: {message}"):
        load_drafter(str(tmp_path), new_model("llama"))


@pytest.mark.parametrize("is_tied", [True, False])
def test_weights_that_files_lack_are_named_but_for_tied_ones(tmp_path, is_tied):
    new_model("llama", tie_word_embeddings=is_tied).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in tensors) != is_tied
    assert load_whole(AutoModelForCausalLM, str(tmp_path)).config.vocab_size == 97
    for number, name in enumerate([name for name in sorted(tensors) if ".layers." in name][:5], start=1):
        del tensors[name]
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        more = rf" and {number - 3} others$" if number > 3 else "$"
        with pytest.raises(ValueError, match=f"lack weights of LlamaForCausalLM, which would be random: .*{more}"):
            load_whole(AutoModelForCausalLM, str(tmp_path))
