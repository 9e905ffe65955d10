"""Tree attention is switched on for one thread's forward at a time and leaves no trace."""

import threading
from contextvars import copy_context

import numpy as np
import pytest
import torch

from hf_smartspec.generate import enabled
from hf_smartspec.target_model.attention import tree_attention as attention
from hf_smartspec.target_model.attention.tree_attention import attention_configs, tree_attention_step
from hf_smartspec.target_model.forward.packed import PackedForward
from hf_smartspec.target_model.layout.rows import CacheRow, RowInput
from hf_smartspec.target_model.layout.step_layout import build_layout
from tests.models import new_model


@pytest.fixture
def model():
    return new_model("llama")


def a_layout():
    return build_layout([[RowInput(CacheRow(0), torch.arange(3, 6).numpy())]])


def test_implementation_is_restored_after_an_error(model):
    before = model.config._attn_implementation
    with pytest.raises(RuntimeError), tree_attention_step(attention_configs(model), a_layout()):
        assert model.config._attn_implementation != before
        raise RuntimeError
    assert model.config._attn_implementation == before


def test_implementation_stays_until_the_last_of_overlapping_steps_has_ended(model):
    before = model.config._attn_implementation
    configs, layout = attention_configs(model), a_layout()
    first, second = tree_attention_step(configs, layout), tree_attention_step(configs, layout)
    threads = copy_context(), copy_context()  # as two threads would have them
    threads[0].run(first.__enter__)
    threads[1].run(second.__enter__)
    threads[0].run(first.__exit__, None, None, None)
    assert model.config._attn_implementation != before
    threads[1].run(second.__exit__, None, None, None)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])  # without sinks and with them
def test_plain_forward_of_another_thread_is_not_disturbed_by_a_step_under_way(name):
    model = new_model(name)
    ids = torch.tensor([[5, 6, 7, 8]])
    mask = torch.tensor([[0, 1, 1, 1]])
    expected = model(input_ids=ids, attention_mask=mask).logits[:, 1:]
    results = []
    with tree_attention_step(attention_configs(model), a_layout()):
        thread = threading.Thread(
            target=lambda: results.append(model(input_ids=ids, attention_mask=mask).logits[:, 1:])
        )
        thread.start()
        thread.join()
    torch.testing.assert_close(results[0], expected)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02), (torch.float16, 0.003)])
@pytest.mark.parametrize("lengths", [[4], [4, 4], [4, 6]])
def test_single_queries_attend_to_their_own_row(dtype, error, lengths):
    """Also where they are computed in twos, as single ones take longer in half precision."""
    stride = max(lengths) + 1
    places = [CacheRow(slot, length, line=slot * stride, stride=stride) for slot, length in enumerate(lengths)]
    rows = [RowInput(row, np.array([7])) for row in places]
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, len(rows), 3, stride, 8, generator=generator).to(dtype)
    memories = [memory.transpose(0, 1).flatten(1, 2)[None] for memory in (keys, values)]
    queries = torch.randn(1, 3, len(rows), 8, generator=generator).to(dtype)
    layout = build_layout([rows])
    token = attention._layout.set(layout)
    try:
        output, _ = attention.tree_attention(torch.nn.Module(), queries, *memories, None, replaces="sdpa")
    finally:
        attention._layout.reset(token)
    for row, length in enumerate(lengths):
        scores = torch.einsum("hd,hkd->hk", queries[0, :, row].float(), keys[row, :, : length + 1].float())
        expected = torch.einsum("hk,hkd->hd", (scores / 8**0.5).softmax(-1), values[row, :, : length + 1].float())
        torch.testing.assert_close(output[0, row].float(), expected, atol=error, rtol=error)


def test_sinks_that_are_not_supported_are_refused():
    layout, (queries, keys, values) = a_layout(), torch.zeros(3, 1, 2, 16)
    options = {"softcap": 1.0}, {"bias": lambda part: torch.zeros(1, 1, 1, 1)}
    for given in options:
        with pytest.raises(NotImplementedError, match="sinks beside a soft cap or bias"):
            attention.packed_attention(queries, keys, values, layout, **given, sinks=torch.zeros(2))


def test_two_threads_generate_from_one_model(model):
    prompts = [torch.randint(3, 97, (3, 8), generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    arguments = {"max_new_tokens": 40, "eos_token_id": None}
    expected = [model.generate(ids, **arguments) for ids in prompts]
    outputs = {}

    def run(index):
        outputs[index] = [model.generate(prompts[index], assistant="prompt_lookup", **arguments) for _ in range(3)]

    with enabled(model):
        threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for index in range(2):
        assert all(torch.equal(output, expected[index]) for output in outputs[index])


@torch.no_grad()
def test_types_of_layers_that_a_model_ignores_set_no_windows():
    """Mistral's masks have its config's window in all layers, whatever types its config lists."""
    model = new_model("mistral", layer_types=["full_attention"] * 2)
    forward, text = PackedForward(model), torch.arange(3, 23)
    logits, _ = forward.forward([RowInput(forward.add(), text.numpy())])
    expected = model(text[None]).logits[0, -1]
    torch.testing.assert_close(logits[-1], expected, rtol=1e-4, atol=1e-4)
