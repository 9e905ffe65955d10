"""Acceptance forced to 100 % and to 0 %, and the edges of a draft: limits, ends of text, windows, growing memory."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from hf_smartspec.target_model.forward.packed import PackedForward

from .cases import SAMPLING, Case, Setting, settings
from .comparison import Tally, compare
from .models import WINDOW, new_model, noisy_model

SOME = ("llama", "gemma2", "qwen3_moe", "gpt2", "stablelm", "cohere2")
SHAPES = pytest.mark.parametrize("is_tree", [False, True], ids=["chain", "tree"])
SAMPLES = pytest.mark.parametrize("samples", [False, True], ids=["greedy", "sampled"])


def a_setting(architecture: str = "llama", samples: bool = False, **changes) -> Setting:
    """Three ragged rows, 20 new tokens, no end of text but the limit."""
    given = next(settings(architecture, samples, 1))
    prompts = ((5, 9, 5, 9, 5), (11,), (3, 4, 5, 6, 7, 8, 9, 10, 3, 4))
    usual = {"prompts": prompts, "limit": {"max_new_tokens": 20}, "eos": None, "extras": {}}
    sampling = SAMPLING[4] if samples else None
    return replace(given, **usual | {"sampling": sampling, "name": f"{given.name}/{changes}"} | changes)


def run(setting: Setting, kind: str, is_tree: bool = False, num_nodes: int = 5, **arguments):
    """Compares one case; returns the reference and what the source saw, with the engine's statistics."""
    reference = setting.reference()
    tally = Tally()
    recording = compare(Case(setting, kind, is_tree, num_nodes, returns_dict=True), reference, tally, **arguments)
    assert not tally.faults, tally.faults
    assert not tally.differences, "a tie spoils the counts below: change the prompts"
    return reference, recording


def generated(setting: Setting, reference: torch.Tensor) -> list[list[int]]:
    """Every row's new tokens up to its end."""
    return [text[len(prompt) :] for text, prompt in zip(setting.texts(reference), setting.prompts)]


def steps_of_full_acceptance(lengths: list[int], depth: int) -> int:
    """Every step yields the whole draft and one token of the target's own; nothing is drafted behind the end."""
    return sum(-(-length // (depth + 1)) for length in lengths)


@SHAPES
@SAMPLES
@pytest.mark.parametrize("architecture", SOME)
@pytest.mark.parametrize("num_nodes", [1, 4, 9])
def test_all_of_a_right_draft_is_accepted(architecture, samples, is_tree, num_nodes):
    setting = a_setting(architecture, samples)
    _, recording = run(setting, "oracle", is_tree, num_nodes)
    depth = -(-num_nodes // 2) if is_tree else num_nodes  # the other nodes are decoys
    statistics = recording.statistics
    assert statistics.steps == steps_of_full_acceptance([20, 20, 20], depth)
    assert statistics.accepted_tokens == 60 - statistics.steps
    assert statistics.generated_tokens == 60
    if is_tree and num_nodes > 1:
        assert statistics.drafted_tokens > statistics.accepted_tokens, "there must be decoys"
    if not is_tree:
        assert statistics.drafted_tokens == statistics.accepted_tokens == recording.accepted


@SHAPES
@SAMPLES
@pytest.mark.parametrize("architecture", SOME)
def test_nothing_of_a_wrong_draft_is_accepted(architecture, samples, is_tree):
    setting = a_setting(architecture, samples)
    _, recording = run(setting, "wrong", is_tree, 5)
    statistics = recording.statistics
    assert statistics.accepted_tokens == 0 and statistics.drafted_tokens > 60
    assert statistics.steps == statistics.generated_tokens == 60


@SAMPLES
def test_empty_drafts_are_plain_decoding(samples):
    _, recording = run(a_setting(samples=samples), "empty")
    statistics = recording.statistics
    assert statistics.drafted_tokens == 0 and statistics.steps == 60 and statistics.forwards == 20


@SHAPES
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "olmoe"])
def test_a_draft_with_the_targets_own_weights_is_accepted_whole(architecture, is_tree, monkeypatch):
    monkeypatch.setattr("tests.cases.noisy_model", partial(noisy_model, noise=0.0))
    for samples in (False, True):
        _, recording = run(a_setting(architecture, samples), "draft", is_tree, 4)
        assert recording.statistics.accepted_tokens > (20 if is_tree else 47)
        if not is_tree:  # five tokens a step
            assert recording.statistics.steps == 12


@SAMPLES
@pytest.mark.parametrize("row", [0, 1, 2])
def test_drafts_stay_right_when_other_rows_have_ended(row, samples, monkeypatch):
    """Rows change their places in the draft's cache then, and must not take one another's drafts."""
    monkeypatch.setattr("tests.cases.noisy_model", partial(noisy_model, noise=0.0))
    endless = a_setting(samples=samples)
    eos = generated(endless, endless.reference())[row][6]
    setting = replace(endless, eos=(eos,), name=f"{endless.name}/ends{row}")
    reference, recording = run(setting, "draft", num_nodes=3)
    lengths = list(map(len, generated(setting, reference)))
    assert min(lengths) <= 7 and max(lengths) == 20
    assert recording.statistics.steps == steps_of_full_acceptance(lengths, 3)


@SHAPES
@SAMPLES
@pytest.mark.parametrize("max_new_tokens", range(1, 9))
def test_drafts_never_lead_beyond_the_limit(max_new_tokens, samples, is_tree):
    """The oracle knows a longer text, and goes on drafting behind the limit."""
    longer = a_setting(samples=samples, limit={"max_new_tokens": 30})
    source = Case(longer, "oracle", is_tree, 12, False).source(longer.reference())
    setting = replace(longer, limit={"max_new_tokens": max_new_tokens}, name="limited")
    _, recording = run(setting, "oracle", is_tree, 12, source=source)
    depth = 6 if is_tree else 12
    statistics = recording.statistics
    assert statistics.steps == steps_of_full_acceptance([max_new_tokens] * 3, depth)
    assert (statistics.drafted_tokens > 0) == (max_new_tokens > 1)
    if not is_tree:
        assert statistics.drafted_tokens == statistics.accepted_tokens, "nothing was verified that could not count"


@SHAPES
@SAMPLES
@pytest.mark.parametrize("depth", range(6))
def test_a_row_ends_at_an_eos_anywhere_in_an_accepted_path(depth, samples, is_tree):
    """The first row's text ends `depth` tokens behind the root of its second draft; others go on."""
    endless = a_setting(samples=samples)
    tokens = generated(endless, endless.reference())[0]
    step = 6  # tokens of a full step
    position = step + depth
    eos = tokens[position]
    position = tokens.index(eos)  # it may have come up before
    setting = replace(endless, eos=(eos,), name=f"{endless.name}/eos{eos}")
    reference, recording = run(setting, "oracle", is_tree, 9 if is_tree else 5)
    rows = generated(setting, reference)
    assert rows[0] == tokens[: position + 1] and rows[0][-1] == eos
    assert recording.statistics.steps == steps_of_full_acceptance(list(map(len, rows)), 5)
    assert recording.statistics.generated_tokens == sum(map(len, rows))


@SHAPES
@pytest.mark.parametrize("kind", ["oracle", "draft"])
def test_drafts_do_not_outgrow_learned_positions(kind, is_tree, monkeypatch):
    """The text ends one token before the model's positions do; the limit on new tokens lies far behind."""
    model = new_model("gpt2", n_positions=24)
    for name in ("shared_model", "noisy_model"):
        monkeypatch.setattr(f"tests.cases.{name}", lambda *args, **kwargs: model)
    longest = tuple(range(3, 15))
    short = a_setting("gpt2", prompts=((5, 9, 5), longest), limit={"max_new_tokens": 12})
    reference = short.reference()
    first, second = generated(short, reference)
    ends = (next(token for token in first if token not in second[:10]), second[10])
    assert second[10] not in second[:10], "the longer row must end at its eleventh token: change the prompt"
    source = Case(short, kind, is_tree, 9, False).source(reference)
    # Behind the end, the drafts go on with what comes to mind.
    if kind == "oracle" and not is_tree:
        known = source.known
        source.known = lambda text, limit: (known(text, limit) + [1] * limit)[:limit]
    setting = replace(short, limit={"max_new_tokens": 100}, eos=ends, name="endless")
    _, recording = run(setting, kind, is_tree, 9, source=source)
    assert recording.accepted > 0


def test_text_behind_an_eos_in_the_draft_is_not_generated():
    """The draft goes on behind the end of the text, and rightly so if it were not the end."""
    endless = a_setting()
    reference = endless.reference()
    source = Case(endless, "oracle", False, 10, False).source(reference)
    setting = replace(endless, eos=(generated(endless, reference)[0][3],), name="ended")
    reference, _ = run(setting, "oracle", num_nodes=10, source=source)
    assert len(generated(setting, reference)[0]) <= 4


@pytest.mark.parametrize("architecture", ["mistral", "gemma2", "gemma3_text", "starcoder2", "qwen2_moe+window"])
@pytest.mark.parametrize(("kind", "is_tree"), [("oracle", True), ("draft", False), ("draft", True), ("lookup", True)])
def test_texts_many_windows_long(architecture, kind, is_tree):
    prompts = (tuple(range(3, 3 + 4 * WINDOW)), (7, 8, 9), tuple(range(60, 40, -1)))
    setting = a_setting(architecture, prompts=prompts, limit={"max_new_tokens": 8 * WINDOW})
    _, recording = run(setting, kind, is_tree, 7)
    assert recording.drafted > 0 and (recording.accepted > 0 or kind == "lookup")


@pytest.mark.parametrize(("kind", "is_tree"), [("oracle", True), ("draft", False), ("lookup", False)])
def test_soft_caps_with_large_logits(kind, is_tree, monkeypatch):
    model = new_model("gemma2", attn_logit_softcapping=5.0, final_logit_softcapping=3.0)
    for name, parameter in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            parameter.mul_(4)
    monkeypatch.setattr("tests.cases.shared_model", lambda *args, **kwargs: model)
    monkeypatch.setattr("tests.cases.noisy_model", lambda *args, **kwargs: model)
    _, recording = run(a_setting("gemma2"), kind, is_tree, 6)
    assert recording.accepted > 0 or kind == "lookup"


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt2"])
@pytest.mark.parametrize("kind", ["draft", "lookup", "oracle"])
def test_prompts_longer_than_a_piece_of_the_prefill(architecture, kind):
    """512 tokens are fed at once; the second row's prompt takes part in the first piece only."""
    text = [(7 * i) % 89 + 3 for i in range(700)]
    setting = a_setting(architecture, prompts=(tuple(text[:700]), tuple(text[:40]), tuple(text[:513])))
    _, recording = run(setting, kind)
    assert recording.drafted > 0 and (recording.accepted > 0 or kind == "lookup")


def test_prefill_chunk_size_of_the_caller_is_heeded(monkeypatch):
    widths = []
    run_once = PackedForward._run

    def counting_run(self, planned):
        widths.append(max(item.num_tokens for item in planned.rows))
        return run_once(self, planned)

    monkeypatch.setattr(PackedForward, "_run", counting_run)
    setting = a_setting(prompts=(tuple(range(3, 51)), (4, 5, 6)))
    run(setting, "wrong", num_nodes=3, prefill_chunk_size=8)
    assert max(widths) == 8 + 3, "the last piece of the prompt and a draft"


@SHAPES
@pytest.mark.parametrize("kind", ["oracle", "draft", "lookup"])
def test_memory_grows_while_rows_run(kind, is_tree, monkeypatch):
    """Room for one row of one token to begin with, in the target's cache as in the draft's."""
    grown = []

    class Small(PackedForward):
        def __init__(self, model, num_rows=1, capacity=256, prefill_chunk=512, choose=None):
            super().__init__(model, 1, 1, prefill_chunk, choose)
            grown.append(self)

    monkeypatch.setattr("hf_smartspec.target_model.written.registry.PackedForward", Small)
    setting = a_setting(limit={"max_new_tokens": 40})
    _, recording = run(setting, kind, is_tree, 6)
    assert recording.drafted > 0
    assert len(grown) == (2 if kind == "draft" else 1)
    assert all(forward.cache.num_lines > 3 * 40 for forward in grown)


@SAMPLES
@pytest.mark.parametrize("num_failing", [1, 2])
def test_rows_whose_source_fails_go_on_and_others_keep_theirs(num_failing, samples):
    setting = a_setting(samples=samples)
    reference = setting.reference()
    failing = [list(prompt) for prompt in setting.prompts[:num_failing]]
    oracle = Case(setting, "oracle", False, 4, False).source(reference)
    draft = oracle.draft

    def break_for_some(text, limit):
        if any(text[: len(prompt)] == prompt and len(text) > len(prompt) for prompt in failing):
            raise RuntimeError("broken")
        return draft(text, limit)

    oracle.draft = break_for_some
    _, recording = run(setting, "flaky", num_nodes=4, source=oracle)
    # A failing row takes one full step, and then a step for each of its remaining 15 tokens.
    expected = num_failing * (1 + 15) + (3 - num_failing) * 4
    assert recording.statistics.steps == expected


def test_lookup_finds_repetitions():
    _, recording = run(a_setting(limit={"max_new_tokens": 60}), "lookup")
    assert recording.accepted > 0
