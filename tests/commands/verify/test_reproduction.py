"""Reproduction, the part of `smartspec verify` for half precision: would it notice?"""

import io

import pytest
import torch
from rich.console import Console
from transformers import GenerationConfig

from hf_smartspec.candidates.base import NoCandidates
from hf_smartspec.commands.common.console import environment
from hf_smartspec.commands.common.exactness import Rounding
from hf_smartspec.commands.common.runs import Decoding
from hf_smartspec.commands.verify.command import Verifier
from hf_smartspec.commands.verify.comparison import TokenCheck
from hf_smartspec.commands.verify.drafts import Drafting, ReplayCandidates, ways_of_drafting
from hf_smartspec.commands.verify.report import Report, print_report
from hf_smartspec.commands.verify.reproduction import Reproducer, Reproduction
from hf_smartspec.cpu.few_tokens import ANY, most_tokens
from hf_smartspec.decoding.statistics import GenerationStatistics
from hf_smartspec.prepare.config import SmartSpecConfig

from ...models import RECURRENT, new_model

PROMPTS = [[5, 6, 7, 8, 5, 6, 7], list(range(3, 75)), [9, 9]]
DECODINGS = [Decoding(), Decoding(7)]


def model_of(name="llama", **options):
    model = new_model(name, head_dim=16, **options)
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=None)
    return model


class SilentCandidates(NoCandidates):
    default_num_nodes = 4


def report_of(model, **options) -> Report:
    rounding, plain_tokens = Rounding("bfloat16", 0.0), {1: []}
    setting = environment(model.device, torch.bfloat16)
    return Report("folder", "auto", setting, "here", [7, 72, 2], 8, rounding, plain_tokens=plain_tokens, **options)


@pytest.mark.skipif(most_tokens(torch.bfloat16) < ANY, reason="long prompts are left to torch on this CPU")
@pytest.mark.parametrize("name", ["llama", *[name for name in ("qwen3_5_text",) if name in RECURRENT]])
@pytest.mark.parametrize("decoding", DECODINGS, ids=["greedy", "sampled"])
def test_every_way_has_the_tokens_of_each_prompt_alone(decoding, name):
    model = model_of(name, dtype=torch.bfloat16)
    reproducer = Reproducer(model, PROMPTS, ways_of_drafting("auto", 99), [1, 2], 12)
    found = list(reproducer.compare(decoding))
    names = ["auto", "replayed chain", "replayed tree"]
    assert [(item.batch_size, item.drafts) for item in found] == [
        *[(1, name) for name in names],
        *[(size, name) for size in (2, 0) for name in ("none", *names)],
    ]
    assert all((item.num_rows, item.num_tokens, item.num_differing) == (3, 36, 0) for item in found)


def test_tokens_that_depend_on_drafts_are_noticed():
    """Those of rejection sampling do."""
    model, draft = model_of(), model_of(seed=1)
    way = Drafting.with_config("rejection", SmartSpecConfig(draft, verification="rejection", num_nodes=4))
    found = list(Reproducer(model, PROMPTS, [way], [1], 24).compare(Decoding(3)))
    assert [(item.drafts, item.batch_size) for item in found] == [("rejection", 1), ("none", 0), ("rejection", 0)]
    assert found[0].num_differing and not found[1].num_differing


def test_a_difference_is_a_failure_where_there_must_be_none():
    model = model_of()
    counts = GenerationStatistics(drafted_tokens=9, accepted_tokens=5)
    found = [Reproduction("greedy", "auto", size, 3, 36, size // 8, counts) for size in (1, 8, 0)]
    for must_reproduce in (True, False):
        report = report_of(model, reproductions=found, must_reproduce=must_reproduce)
        assert report.failures == ["greedy, auto, batch 8: not the tokens alone"][: int(must_reproduce)]
        stream = io.StringIO()
        print_report(report, Console(file=stream, width=120), None)
        printed = stream.getvalue()
        assert "engine" in printed and "1 of 3 differ" in printed
        assert ("NOT lossless" in printed) is must_reproduce
        assert ("Not reproducible: 1 of 9 rows differ" in printed) is not must_reproduce
        assert report.as_dict()["is_lossless"] is (False if must_reproduce else None)


def test_what_is_not_reproduced_is_said_beside_ties():
    same = TokenCheck("greedy", "auto", 1, 3, 36, GenerationStatistics(accepted_tokens=5))
    report = report_of(model_of(), tokens=[same], reproductions=[Reproduction("greedy", "auto", 0, 3, 36, 1)])
    stream = io.StringIO()
    print_report(report, Console(file=stream, width=120), None)
    assert "1 of 3 rows differ from those of their prompts alone" in " ".join(stream.getvalue().split())
    assert "Lossless:" not in stream.getvalue()


@pytest.mark.skipif(most_tokens(torch.bfloat16) < ANY, reason="long prompts are left to torch on this CPU")
def test_differences_found_before_an_interruption_are_failures(monkeypatch):
    def compare(self, decoding):
        yield Reproduction("greedy", "auto", 1, 3, 36, 1)
        raise KeyboardInterrupt

    monkeypatch.setattr(Reproducer, "compare", compare)
    model = model_of(dtype=torch.bfloat16)
    report = report_of(model)
    with pytest.raises(KeyboardInterrupt):
        Verifier(model, "auto", PROMPTS, [1], 6, 0).run_against_alone(report, 0)
    assert report.failures == ["greedy, auto, batch 1: not the tokens alone"]


def test_drafters_that_never_draft_are_named():
    model = model_of()
    report = report_of(model)
    Verifier(model, SilentCandidates(), PROMPTS, [3], 6, 0).run_against_alone(report, 0)
    assert report.warnings == ["SilentCandidates: no drafts, so that nothing was verified; use other or more prompts"]


@pytest.mark.skipif(most_tokens(torch.bfloat16) < ANY, reason="long prompts are left to torch on this CPU")
def test_the_command_compares_them_in_half_precision_only():
    for dtype, num in ((torch.bfloat16, 2 * (3 + 4 + 4)), (torch.float32, 0)):
        model = model_of(dtype=dtype)
        verifier = Verifier(model, "auto", PROMPTS, [1, 2], 6, 0)
        report = report_of(model)
        verifier.run(report, 0)
        assert len(report.reproductions) == num and not report.failures
        assert report.must_reproduce is (dtype is torch.bfloat16)


def test_embeddings_that_depend_on_the_longest_prompt_need_not_be_reproduced():
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = model_of(dtype=torch.bfloat16, rope_parameters=scaling)
    report = report_of(model)
    Verifier(model, "auto", PROMPTS, [1, 2], 4, 0).run(report, 0)
    assert report.reproductions and not report.must_reproduce and not report.failures


def test_replayed_drafts_are_those_of_the_engines_requests():
    """So that an engine accepts many of them, in the order in which requests come."""
    model = model_of()
    seen = []
    way = Drafting("replayed", lambda rows: seen.append(ReplayCandidates(rows, 99, error_rate=0.0)) or seen[-1])
    assert not list(Reproducer(model, PROMPTS, [way], [], 12).compare(Decoding()))[-1].num_differing
    assert list(seen[0]._num_seen.values()) == [12] * 3
