"""Models that others have changed: adapters per row and dynamic quantization."""

import warnings
from contextlib import contextmanager
from functools import partial

import pytest
import torch

import hf_smartspec

from ...generate.helpers import prompts, tiny_llama

INPUTS = prompts([4, 6])
ARGUMENTS = {"max_new_tokens": 12, "eos_token_id": None}


def _by_row(module, args, kwargs, adapter_names):
    assert len(args[0]) == len(adapter_names), "one adapter per row"
    return args, kwargs


def _shifted(module, args, output, adapter_names):
    return output + torch.tensor([0.5 if name == "b" else 0.0 for name in adapter_names])[:, None, None]


@contextmanager
def adapters_by_row(model, names):
    """As PEFT does for the time of a call with `adapter_names`: hooks on layers that look at the row's adapter."""
    handles = []
    for layer in model.model.layers:
        linear = layer.self_attn.q_proj
        handles += [
            linear.register_forward_pre_hook(partial(_by_row, adapter_names=names), with_kwargs=True),
            linear.register_forward_hook(partial(_shifted, adapter_names=names)),
        ]
    yield
    for handle in handles:
        handle.remove()


def test_rows_with_adapters_of_their_own_are_decoded_plainly(caplog):
    model = hf_smartspec.enable(tiny_llama())
    base = model.generate(**INPUTS, **ARGUMENTS)
    with adapters_by_row(model, ["a", "b"]):
        plain = model.generate(**INPUTS, **ARGUMENTS)
        assert torch.equal(model.generate(**INPUTS, **ARGUMENTS, assistant="prompt_lookup"), plain)
    assert not torch.equal(plain, base)
    assert "every row has an adapter of its own" in caplog.text
    assert torch.equal(model.generate(**INPUTS, **ARGUMENTS, assistant="prompt_lookup"), base)
    assert model.smartspec_statistics.last.drafted_tokens > 0, "packed again"


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT asks for it
def test_peft_adapters_per_row():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model, options = tiny_llama(), {"r": 4, "target_modules": ["q_proj"], "init_lora_weights": False}
    wrapped = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options), adapter_name="a").eval()
    wrapped.add_adapter("b", peft.LoraConfig(task_type="CAUSAL_LM", **options))
    plain = wrapped.generate(**INPUTS, **ARGUMENTS, adapter_names=["a", "b"])
    with hf_smartspec.enabled(wrapped):
        actual = wrapped.generate(**INPUTS, **ARGUMENTS, adapter_names=["a", "b"], assistant="prompt_lookup")
    assert torch.equal(actual, plain)


def test_dynamic_quantization_is_warned_of_once(caplog):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces another tool
        model = torch.ao.quantization.quantize_dynamic(tiny_llama(), {torch.nn.Linear}, dtype=torch.qint8)
    hf_smartspec.enable(model)
    for _ in range(2):
        assert model.generate(**INPUTS, **ARGUMENTS, assistant="prompt_lookup").shape == (2, 18)
    (message,) = [text for text in caplog.messages if "batched with" in text]
    assert "LlamaForCausalLM" in message
    hf_smartspec.enable(tiny_llama()).generate(**INPUTS, **ARGUMENTS, assistant="prompt_lookup")
    assert sum("batched with" in text for text in caplog.messages) == 1


def test_rows_of_eight_bits_by_bitsandbytes_depend_on_one_another(caplog):
    """By its default, features that are large in any token are taken in half precision for all of them."""
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    torch.manual_seed(0)
    tokens = torch.randn(2, 64).half()
    tokens[1, 3] = 20
    for threshold, depend in ((6.0, True), (0.0, False)):
        linear = bitsandbytes.nn.Linear8bitLt(64, 32, bias=False, has_fp16_weights=False, threshold=threshold)
        linear = linear.to("cpu").eval()  # in training, products are those of floats
        with torch.no_grad():
            assert torch.equal(linear(tokens)[:1], linear(tokens[:1])) != depend
        model = hf_smartspec.enable(tiny_llama())
        model.model.layers[0].unused = linear
        model.generate(**INPUTS, **ARGUMENTS, assistant="prompt_lookup")
        assert ("`llm_int8_threshold=0.0` does not" in caplog.text) == depend
        caplog.clear()
