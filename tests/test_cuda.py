"""
The same tokens on CUDA as on the CPU, and forwards that are recorded as CUDA graphs. Every architecture against plain
`generate` on CUDA itself: `HF_SMARTSPEC_DEVICE=cuda pytest tests/test_exactness.py tests/test_hybrids.py`.
"""

import pytest
import torch

import hf_smartspec
from hf_smartspec import BlockDrafter, Engine, SmartSpecConfig
from hf_smartspec.candidates.heads.eagle.heads import EagleHeads
from hf_smartspec.candidates.heads.eagle.parallel import ParallelCandidates
from hf_smartspec.candidates.heads.feature_source import FeatureCandidates
from hf_smartspec.target_model.graphs import recorder
from hf_smartspec.target_model.model_state import state_of

from .accelerator_cases import CHAIN, LENGTHS, LEVELS, NUM_TOKENS, OPTIONS, SOURCES, generate, tokens_of
from .candidates.heads.blocks.published import random_drafter, z_lab
from .candidates.heads.by_heart import texts_of, trained_eagle
from .candidates.heads.fitted import fitted_parallel
from .generate.helpers import noisy_copy, prompts, tiny_llama
from .models import DEVICE, PACKED, RECURRENT, new_model

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
    pytest.mark.skipif(DEVICE.type != "cpu", reason="compares the CPU with CUDA"),
]
ROOMY = [name for name in ("mistral", "gemma3_text", "gpt2", "qwen3_moe") if name in PACKED]
HYBRID = [name for name in ("qwen3_5_text", "mamba2", "lfm2") if name in RECURRENT]


@pytest.fixture(scope="module")
def on_cpu():
    target = tiny_llama(eos_token_id=None)
    target.generation_config.eos_token_id = None
    return target, noisy_copy(target, 0.03)


@pytest.fixture(scope="module")
def on_cuda(on_cpu):
    return [noisy_copy(model, 0.0).to("cuda") for model in on_cpu]


@pytest.fixture(scope="module")
def expected(on_cpu):
    """Of every kind of options, what the CPU generates without drafts."""
    return {name: generate(on_cpu, "none", options) for name, options in OPTIONS.items()}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("source", [name for name in SOURCES if name != "rejection"])
def test_devices_agree(on_cuda, expected, source, name):
    for _ in range(3):  # what comes again is recorded, and replayed
        output = generate(on_cuda, source, OPTIONS[name])
        assert output.sequences.device.type == "cuda"
        assert tokens_of(output) == tokens_of(expected[name])
    if source in LEVELS:
        assert output.statistics.accepted_tokens > 0


def test_devices_agree_on_rejection(on_cpu, on_cuda):
    reference, output = (generate(models, "rejection", OPTIONS["sampled"]) for models in (on_cpu, on_cuda))
    assert tokens_of(output) == tokens_of(reference)
    assert output.statistics.accepted_tokens == reference.statistics.accepted_tokens > 0


@pytest.fixture
def counted(monkeypatch):
    """Counts of the forwards that are recorded, and of the recordings that are replayed."""
    counted = {"recorded": 0, "replayed": 0}
    record = recorder.CudaRecorder.record

    def noting(self, function):
        replay, result = record(self, function)
        counted["recorded"] += 1

        def counting():
            counted["replayed"] += 1
            replay()

        return counting, result

    monkeypatch.setattr(recorder.CudaRecorder, "record", noting)
    return counted


@pytest.mark.parametrize("source", ["none", "lookup", "tree"])
def test_forwards_are_recorded_and_replayed(on_cpu, on_cuda, counted, source):
    state_of(on_cuda[0]).memory = None  # and what other tests have recorded
    reference = tokens_of(generate(on_cpu, "none", OPTIONS["sampled"], lengths=(9,)))
    for _ in range(5):
        assert tokens_of(generate(on_cuda, source, OPTIONS["sampled"], lengths=(9,))) == reference
    assert counted["replayed"] > counted["recorded"] > 0


@pytest.mark.parametrize("num_rows", [8, 21])
def test_recorded_steps_of_single_tokens_agree_in_half_precision(on_cpu, counted, num_rows):
    """21 rows are padded; without drafts each has one query, and flash attention takes grouped heads for queries."""
    target = noisy_copy(on_cpu[0], 0.0).to("cuda", torch.bfloat16)
    engine = Engine(target, assistant="none", max_batch_size=num_rows)
    rows = [row.tolist() for row in prompts([9] * num_rows)["input_ids"]]
    answers = []
    for _ in range(5):
        outputs = engine.generate(rows, max_new_tokens=NUM_TOKENS, do_sample=True, seed=7)
        answers.append([output.generated_tokens for output in outputs])
    assert counted["replayed"] > counted["recorded"] > 0
    # The first answers were launched call by call.
    assert all(answer == answers[0] for answer in answers[1:])


@pytest.mark.parametrize("architecture", [*ROOMY, *HYBRID])
@pytest.mark.parametrize("source", ["chain", "tree"])
def test_architectures_agree(architecture, source):
    target = new_model(architecture)
    target.generation_config.eos_token_id = None
    models = target, noisy_copy(target, 0.02)
    reference = tokens_of(generate(models, "none", {}))
    output = generate([noisy_copy(model, 0.0).to("cuda") for model in models], source, {})
    assert tokens_of(output) == reference and output.statistics.accepted_tokens > 0


@pytest.mark.parametrize("architecture", ["t5", "bart"])
def test_decoders_behind_encoders_agree(architecture):
    models = new_model(architecture), new_model(architecture)
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.mul_(1.02)
    on_cuda = [noisy_copy(model, 0.0).to("cuda") for model in models]
    for source in ("lookup", "tree"):
        assert tokens_of(generate(on_cuda, source, OPTIONS["sampled"])) == tokens_of(
            generate(models, "none", OPTIONS["sampled"])
        )


def learned(kind, target, folder):
    """A drafter from a folder, on the device of its target."""
    if kind == "blocks":
        return BlockDrafter.from_pretrained(folder, target)
    heads = EagleHeads.from_pretrained(folder, target)
    return ParallelCandidates(heads) if kind == "parallel" else FeatureCandidates(heads, width=3)


@pytest.mark.parametrize("kind", ["eagle", "parallel", "blocks"])
@pytest.mark.parametrize("name", ["greedy", "sampled"])
def test_learned_drafters_agree(on_cpu, on_cuda, expected, tmp_path, kind, name):
    target = on_cpu[0]
    if kind == "blocks":
        vocab = target.config.vocab_size
        z_lab(
            random_drafter(target.config.hidden_size, vocab, windows=(6, None), causal=(True, False)), vocab, tmp_path
        )
    elif kind == "eagle":
        trained_eagle(target, texts_of(target, prompts(LENGTHS), NUM_TOKENS), steps=40).save_pretrained(tmp_path)
    else:
        texts = target.generate(**prompts(LENGTHS[:1]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None)
        fitted_parallel(target, texts).save_pretrained(tmp_path)
    found = []
    for model in (target, on_cuda[0]):
        ids = {key: item.to(model.device) for key, item in prompts(LENGTHS).items()}
        settings = {"max_new_tokens": NUM_TOKENS, "return_dict_in_generate": True} | OPTIONS[name]
        with hf_smartspec.enabled(model):
            config = SmartSpecConfig(learned(kind, model, tmp_path), num_nodes=2 * CHAIN)
            found.append(model.generate(**ids, assistant=config, **settings))
    assert tokens_of(found[0]) == tokens_of(found[1]) == tokens_of(expected[name])
    statistics = [(item.statistics.drafted_tokens, item.statistics.accepted_tokens) for item in found]
    assert statistics[0] == statistics[1] and statistics[0][0] > NUM_TOKENS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_engines_serve_many(on_cpu, dtype):
    target = noisy_copy(on_cpu[0], 0.0).to("cuda", dtype)
    rows = [row[mask.bool()].tolist() for row, mask in zip(*prompts((9, 5, 12, 5, 30, 2, 17, 8), seed=3).values())]
    answers = []
    for source in ("none", "suffix"):
        engine = Engine(target, SmartSpecConfig(source), max_batch_size=3)
        assert engine._runner.loop.max_prefill_tokens == 2048
        outputs = engine.generate(rows, max_new_tokens=NUM_TOKENS, do_sample=True, seed=7)
        assert all(output.error is None for output in outputs)
        answers.append([output.generated_tokens for output in outputs])
    if dtype == torch.float32:
        assert answers[0] == answers[1]
