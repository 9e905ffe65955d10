"""Long prompts as compiled programs, of which one has memory for many tokens."""

import copy
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import hf_smartspec
from hf_smartspec.cpu import screening
from hf_smartspec.cpu.few_tokens import has_kernels
from hf_smartspec.target_model.layout.rows import RowInput
from hf_smartspec.target_model.written import compiled as compiled_module
from hf_smartspec.target_model.written import packed_forward, written_decoder

from ...models import RECURRENT
from .test_compiled import NAMES, by_layers, model_of, tried

pytestmark = pytest.mark.skipif(not has_kernels(torch.float32), reason="there is no compiled code for this CPU")


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", *[name for name in NAMES if name in RECURRENT]])
def test_long_prompts_run_as_programs(name, kind, programs, monkeypatch):
    """Several rows, with hidden states, for best tokens, and pieces of a prompt whose logits are not asked for."""
    monkeypatch.setattr(screening, "_LEAST", 1)  # as of large heads, best tokens are found by a screen
    # In int8, maps lie side by side where they have whole blocks of outputs.
    options = {"linear_num_value_heads": 16} if (name, kind) == ("qwen3_5_text", "int8") else {}
    model = model_of(name, torch.bfloat16 if kind == "bfloat16" else torch.float32, **options)
    model = hf_smartspec.quantize(model) if kind == "int8" else model
    forward, other = tried(model), by_layers(copy.deepcopy(model))
    programs.clear()
    found = []
    for item in (forward, other):
        rows = [item.add(), item.add()]
        with item.taps.taking({1}) as fed:
            logits, _ = item.forward([RowInput(row, np.arange(num) % 90 + 3) for row, num in zip(rows, (300, 7))])
        best = item.forward([RowInput(rows[1], np.arange(290) % 80 + 3, best_only=True)])[0]
        item.prefill_chunk = 320
        pieces = item.forward([RowInput(rows[0], np.arange(700) % 70 + 3)])[0]
        found.append((logits, fed[rows[0]].pieces[0].states[1], torch.tensor(item.argmax(best)), pieces))
    assert all(map(torch.equal, *found))
    assert programs == [307, 290, 320, 320, 60]
    free = written_decoder(model)._compiled._free
    num_long = sum(len(kept) for (room, *_), kept in free.items() if room > 256)
    assert num_long == 1, "memory of long prompts is kept once"


def test_forwards_of_as_many_tokens_as_fit(programs, monkeypatch):
    monkeypatch.setattr(compiled_module, "_MOST", 301)
    model = model_of("llama")
    forward, other = tried(model), by_layers(copy.deepcopy(model))
    programs.clear()
    for num in (301, 302, 257):
        found, expected = (
            item.forward([RowInput(item.add(), np.arange(num) % 90 + 3)])[0] for item in (forward, other)
        )
        assert torch.equal(found, expected)
    assert programs == [301, 257]


def test_several_callers_of_long_prompts_at_the_same_time():
    model = model_of("llama")
    forwards = [tried(model) for _ in range(4)]
    expected = logits_of_prompts(by_layers(copy.deepcopy(model)))
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(found, expected) for found in pool.map(logits_of_prompts, forwards))


def logits_of_prompts(forward):
    inputs = [RowInput(forward.add(), np.arange(num) % 90 + 3) for num in (300, 400, 270)]
    return torch.cat([forward.forward([item])[0] for item in inputs])


def test_long_prompts_take_little_memory_for_good(programs, monkeypatch):
    monkeypatch.setattr(compiled_module, "_MOST_BYTES", 2**16)
    forward = tried(model_of("llama"))
    programs.clear()
    for num in (4, 300):
        forward.forward([RowInput(forward.add(), np.arange(num) % 90 + 3)])
    assert programs == [4]


def test_a_long_first_prompt_is_not_run_twice(programs):
    """Leave the comparison of the program with the layers to a shorter forward."""
    model = model_of("llama")
    forward = packed_forward(model)
    row = forward.add()
    forward.forward([RowInput(row, np.arange(300) % 90 + 3)])
    assert not programs
    forward.forward([RowInput(row, np.array([5]))])
    assert programs == [1] and written_decoder(model)._is_tried
