"""Functions that steps of decoding call are compiled, or loaded from the disk, before the first step."""

import sys

import numpy as np
import pytest
import torch
from numba.core.errors import TypingError

import hf_smartspec
from hf_smartspec import Engine, jit
from hf_smartspec.candidates.text.suffix import source as suffix
from hf_smartspec.cpu import screening
from hf_smartspec.decoding.loop import DecodingLoop
from hf_smartspec.goodput.estimates import trust

from ..candidates.heads.fitted import fitted_heads
from ..models import new_model, shared_model

pytestmark = pytest.mark.adaptive

PROMPT = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6], [9, 10, 11, 9, 10, 11, 9, 10, 11, 9]])


def _functions():
    modules = [module for name, module in sys.modules.items() if name.startswith("hf_smartspec.")]
    found = [item for module in modules for item in vars(module).values() if isinstance(item, jit._Dispatcher)]
    return list(dict.fromkeys(item for item in found if not isinstance(item, jit._Inner)))


@pytest.fixture(autouse=True)
def within_steps(monkeypatch):
    """Functions that steps compile or load, by name, in a process that has called none before; filled in tests."""
    functions = _functions()
    for function in functions:
        function._reset_overloads()
    monkeypatch.setattr(jit, "_ahead", [function for function in functions if function.given])
    monkeypatch.setattr(screening, "_LEAST", 1)  # screens of small heads, too
    suffix._compile.cache_clear()
    trust._likely.cache_clear()
    found, step, is_step = [], DecodingLoop.step, []
    compile_function = jit._Dispatcher.compile

    def compile_noted(self, signature):
        if is_step and tuple(signature) not in self.overloads:
            found.append((self.py_func.__name__, signature))
        return compile_function(self, signature)

    def step_noted(self):
        is_step.append(True)
        try:
            return step(self)
        finally:
            is_step.pop()

    monkeypatch.setattr(jit._Dispatcher, "compile", compile_noted)
    monkeypatch.setattr(DecodingLoop, "step", step_noted)
    return found


def _generate(model, assistant, rows, **options):
    hf_smartspec.enable(model)
    own = PROMPT[:rows]
    model.generate(own, attention_mask=torch.ones_like(own), max_new_tokens=24, assistant=assistant, **options)
    assert model.smartspec_statistics.last.drafted_tokens, "steps draft"


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": 3}], ids=["greedy", "sampling"])
def test_steps_compile_nothing(within_steps, dtype, rows, options):
    _generate(new_model("llama", dtype=dtype, head_dim=16), "auto", rows, **options)
    assert not within_steps


def test_nor_those_of_recurrent_models(within_steps):
    _generate(new_model("qwen3_next"), "auto", 2)
    assert not within_steps


def test_nor_those_with_heads(within_steps):
    model = shared_model("llama")
    heads = fitted_heads(model, PROMPT)
    _generate(model, heads, 2)
    assert not within_steps


def test_nor_those_of_engines(within_steps):
    with Engine(new_model("llama", head_dim=16), max_batch_size=2) as engine:
        engine.generate(PROMPT.tolist(), max_new_tokens=24)
        assert engine.statistics.drafted_tokens, "steps draft"
    assert not within_steps


def test_what_is_not_compiled_ahead_is_found(within_steps, monkeypatch):
    monkeypatch.setattr(jit, "_ahead", [])
    _generate(new_model("llama"), "auto", 1)
    assert {"flatten", "best_prefix"} <= {name for name, _ in within_steps}


def test_what_cannot_be_compiled_ahead_fails_for_those_who_call_it(monkeypatch):
    def adds(text, number):
        return text + number

    monkeypatch.setattr(jit, "_ahead", [])
    function = jit.compiled_for("f8:1 unicode_type")(adds)
    jit.compile_ahead()
    assert not jit._ahead
    with pytest.raises(TypingError):
        function(np.zeros(1), "a")
