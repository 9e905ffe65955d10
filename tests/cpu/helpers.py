"""Helpers that tests of compiled operators share."""

import torch

import hf_smartspec

from ..models import new_model


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shape[-1]))


def check_decoding(module, monkeypatch):
    """Check that decoding calls the module's operator, and yields the plain tokens."""
    calls, run = [], module.run_operator
    monkeypatch.setattr(module, "run_operator", lambda *arguments: (calls.append(arguments), run(*arguments)))
    model, ids = new_model("llama"), torch.arange(3, 12)[None]
    arguments = {"max_new_tokens": 12, "do_sample": False}
    with hf_smartspec.enabled(model):
        actual = model.generate(ids, **arguments, assistant="auto")
    assert len(calls) > 50
    assert torch.equal(model.generate(ids, **arguments), actual)
