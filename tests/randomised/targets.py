"""Targets of random requests: tiny models, some of them with MTP layers in their files, and what they say."""

import copy
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from hf_smartspec import MtpLayers

from ..candidates.heads.fitted import fitted_mtp
from ..candidates.heads.mtp_targets import HYBRIDS, load_target, write_target
from ..models import DEVICE, RECURRENT, UNPADDED, shared_model, with_noise

NUM_TOKENS = 40
_MTP = {"glm4_moe": 1, "deepseek_v3": 2, "mellum": 1}
USUAL = ("llama", "qwen3", "gpt2", "mistral", "gemma2", "olmo2", "mixtral", "opt", *_MTP)
GROUPS = {"hybrids": (*RECURRENT, *UNPADDED)}  # names that stand for several
STREAMS = ("qwen4_exp_text",)
ARCHITECTURES = (*USUAL, *GROUPS["hybrids"])
NUM_MTP_LAYERS = _MTP | dict.fromkeys(HYBRIDS, 1)

WRITTEN = tuple(name for name in USUAL if name != "deepseek_v3")  # out, by the package


def target(architecture: str) -> PreTrainedModel:
    """One model for the whole session, to be left as it is."""
    return _with_mtp(architecture)[0] if architecture in NUM_MTP_LAYERS else shared_model(architecture)


def known_mtp(architecture: str) -> MtpLayers:
    return _with_mtp(architecture)[1]


@cache
def _with_mtp(architecture: str) -> tuple[PreTrainedModel, MtpLayers]:
    """The target, and its MTP layers, which have learnt from its texts."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        write_target(architecture, Path(folder), NUM_MTP_LAYERS[architecture])
        model = load_target(Path(folder), patch).requires_grad_(False)
        return model, fitted_mtp(model, _said(model))


@cache
def noisy_target(architecture: str) -> PreTrainedModel:
    """A draft model that mostly agrees with the target."""
    return with_noise(copy.deepcopy(target(architecture)))


@cache
def known_texts(architecture: str) -> torch.Tensor:
    """What the target says behind some prompts, `[n, length]`: what drafters are fitted to."""
    return _said(target(architecture))


def _said(model: PreTrainedModel) -> torch.Tensor:
    prompts = torch.tensor([[3 + number, 5 + number, 7 + number, 60 - number] for number in range(24)], device=DEVICE)
    return model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=NUM_TOKENS)
