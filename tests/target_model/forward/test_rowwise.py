"""Models that the packed forward cannot serve: row by row, or plainly, with the same tokens."""

import copy
import logging
from dataclasses import replace

import pytest
import torch
from transformers import LogitsProcessorList, WhisperConfig, WhisperForCausalLM
from transformers.generation import logits_process as hf

import hf_smartspec
from hf_smartspec import PromptLookupCandidates, SeededGumbelLogitsProcessor
from hf_smartspec.target_model.compat import TESTED_ROWWISE_TYPES
from hf_smartspec.target_model.forward.packed import PackedForward
from hf_smartspec.target_model.support.capabilities import can_pack, rowwise_obstacle
from hf_smartspec.target_model.written import written_decoder

from ...cases import Case, left_padded, settings
from ...comparison import Tally, compare, run_cases
from ...covering import part_of
from ...models import ENCODER_DECODER, PACKED, PLAIN, ROWWISE, VOCAB_SIZE, new_model, shared_model
from ...sources import Oracle, Recording, Wrong

WARPERS = {"temperature": 0.8, "top_k": 30}


def warpers(seed: int) -> LogitsProcessorList:
    return LogitsProcessorList(
        [hf.TemperatureLogitsWarper(0.8), hf.TopKLogitsWarper(30), SeededGumbelLogitsProcessor(seed)]
    )


# --- Row by row -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", part_of(ROWWISE, "bloom", "falcon", "llama4_text"))  # the next test has all
def test_row_by_row_gives_the_plain_tokens(architecture, record_property):
    """Greedy and sampled, all batch sizes, chains and (cut down to chains) trees, as for packed models."""
    tally = run_cases(architecture, count=1)
    tally.report(record_property)
    assert not tally.faults, tally.faults
    assert tally.by_kind["foreign"]["drafted"] > 0 and tally.by_kind["lookup"]["drafted"] > 0


@pytest.mark.parametrize("architecture", ROWWISE)
@pytest.mark.parametrize("samples", [False, True])
def test_row_by_row_accepts_all_of_a_right_draft_and_nothing_of_a_wrong_one(architecture, samples):
    given = next(settings(architecture, samples, 1))
    prompts = ((5, 9, 5, 9, 5), (11,), (3, 4, 5, 6, 7, 8, 9, 10, 3, 4))
    setting = replace(given, prompts=prompts, limit={"max_new_tokens": 12}, eos=None, extras={})
    reference = setting.reference()
    for kind, accepted, steps in (("oracle", 27, 9), ("wrong", 0, 36)):
        tally = Tally()
        recording = compare(Case(setting, kind, False, 3, returns_dict=True), reference, tally)
        assert not tally.differences, tally.differences
        assert recording.statistics.accepted_tokens == accepted and recording.statistics.steps == steps
        assert recording.statistics.drafted_tokens > 0


def test_listed_types_are_those_under_test():
    tested = {shared_model(name).config.model_type for name in (*ROWWISE, *ENCODER_DECODER)}
    assert tested >= TESTED_ROWWISE_TYPES


@pytest.mark.parametrize("architecture", [*ROWWISE, *ENCODER_DECODER, "llama", "gemma2", "qwen3_moe"])
def test_the_probe_finds_what_can_run_row_by_row(architecture, monkeypatch):
    monkeypatch.setattr("hf_smartspec.target_model.support.capabilities.TESTED_ROWWISE_TYPES", frozenset())
    assert rowwise_obstacle(new_model(architecture)) is None


@pytest.mark.parametrize("architecture", ["openai-gpt", "bert", "prophetnet"])
def test_the_probe_finds_what_cannot(architecture):
    model = new_model(architecture).train()
    assert rowwise_obstacle(model)
    assert model.training, "probing leaves the model as it was"


def test_a_decoder_of_the_bert_kind_is_served():
    assert rowwise_obstacle(new_model("bert", is_decoder=True)) is None


# --- Encoder and decoder ----------------------------------------------------------------------------------------------


class InOrder:
    """Mixin for sources that know the answer: rows are told apart by their order, since all begin with one token."""

    def start(self, request_id, prompt):
        self.rows = getattr(self, "rows", {})
        self.rows[request_id] = len(self.rows)
        super().start(request_id, prompt)

    def propose(self, request_ids, max_nodes):
        drafts = []
        for name, limit in zip(request_ids, max_nodes):
            self.current = self.rows[name]
            drafts.append(self.draft(self.texts[name], limit))
        return drafts

    def known(self, text, limit):
        whole = self.sequences[self.current]
        assert whole[: len(text)] == text, "the text has left the known way"
        return whole[len(text) : len(text) + limit]


class OracleInOrder(InOrder, Oracle):
    pass


class WrongInOrder(InOrder, Wrong):
    pass


SOURCES = {
    "lookup": lambda texts: PromptLookupCandidates(max_ngram=1),
    "oracle": lambda texts: OracleInOrder(texts),
    "wrong": lambda texts: WrongInOrder(texts, seed=0, is_tree=False),
}


@pytest.fixture
def row_by_row(monkeypatch):
    """Decoders behind an encoder are not packed, as those that the packed forward does not know."""
    monkeypatch.setattr("hf_smartspec.prepare.route.packing_obstacle", lambda *args, **kwargs: "it is not to be packed")


@pytest.mark.parametrize("architecture", ["t5", "bart"])
@pytest.mark.parametrize("batch", [1, 2, 3, 6])
@pytest.mark.parametrize("samples", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("source", SOURCES)
def test_encoder_and_decoder_give_the_plain_tokens(architecture, batch, samples, source, row_by_row):
    model = shared_model(architecture)
    prompts = [[(row + 2) * (7 * i + 1) % (VOCAB_SIZE - 3) + 3 for i in range(3 + 2 * row)] for row in range(batch)]
    kwargs = left_padded(prompts) | {"max_new_tokens": 15}
    noise = {"logits_processor": warpers(5)} if samples else {}
    expected = model.generate(**kwargs, **noise)
    recording = Recording(SOURCES[source](expected.tolist()))
    sampling = {"do_sample": True, "seed": 5} | WARPERS if samples else {}
    with hf_smartspec.enabled(model):
        actual = model.generate(**kwargs, **sampling, assistant=recording)
    assert not recording.errors
    assert torch.equal(actual, expected)
    if source == "lookup":  # finds something where the text repeats itself
        return
    assert recording.drafted > 0
    assert (recording.accepted > 0) == (source == "oracle")


def test_lookup_in_a_decoder_is_not_idle(row_by_row):
    """The comparison above says nothing of lookups that found nothing."""
    model = shared_model("t5")
    recording = Recording(PromptLookupCandidates(max_ngram=1))
    with hf_smartspec.enabled(model):
        model.generate(**left_padded([[5, 6, 7], [8, 9]]), max_new_tokens=60, assistant=recording)
    assert recording.drafted > 0 and recording.accepted > 0


# --- Plainly ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", PLAIN)
@pytest.mark.parametrize("batch", [1, 2, 3, 6])
@pytest.mark.parametrize("samples", [False, True], ids=["greedy", "sampled"])
def test_plain_decoding_gives_the_plain_tokens(architecture, batch, samples):
    model = shared_model(architecture)
    kwargs = left_padded([list(range(3 + row, 6 + 3 * row)) for row in range(batch)]) | {"max_new_tokens": 10}
    noise = {"logits_processor": warpers(7)} if samples else {}
    expected = model.generate(**kwargs, **noise)
    recording = Recording(PromptLookupCandidates(max_ngram=1))
    sampling = {"do_sample": True, "seed": 7} | WARPERS if samples else {}
    with hf_smartspec.enabled(model):
        actual = model.generate(**kwargs, **sampling, assistant=recording)
    assert torch.equal(actual, expected)
    assert recording.num_asked == 0, "nothing is drafted where nothing can be verified"


@pytest.mark.parametrize("architecture", ["rwkv", "openai-gpt"])
def test_the_user_is_told_that_nothing_is_speculated(architecture, caplog):
    model = copy.deepcopy(shared_model(architecture))  # one that has not been told yet
    with hf_smartspec.enabled(model), caplog.at_level(logging.WARNING):
        model.generate(**left_padded([[3, 4, 5]]), max_new_tokens=3, assistant="prompt_lookup")
    messages = [record.getMessage() for record in caplog.records if "without speculation" in record.getMessage()]
    assert len(messages) == 1 and type(model).__name__ in messages[0]


# --- Who is served how ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", PACKED)
def test_packed_models_are_served_packed_with_padding_as_well(architecture, monkeypatch):
    """They must not slip into the slow path unnoticed, for want of positions say."""
    calls, model = [], shared_model(architecture)
    written_decoder(model)  # is tried out in packed forwards of its own
    run = PackedForward._run
    monkeypatch.setattr(PackedForward, "_run", lambda self, *args: calls.append(self.model) or run(self, *args))
    with hf_smartspec.enabled(model):
        model.generate(**left_padded([[3, 4, 5], [6]]), max_new_tokens=4, assistant="prompt_lookup")
    assert calls and all(called is model for called in calls)


def test_models_that_count_positions_from_the_padding_are_not_packed_with_padding():
    """Whisper's decoder makes its positions itself, from the first column on, and knows nothing of the mask."""
    size = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64, "num_mel_bins": 8}
    size["encoder_layers"] = 2  # which the length of the cache follows
    tokens = {
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 3,
        "start_token_id": 3,
    }
    config = WhisperConfig(vocab_size=VOCAB_SIZE, **size, **tokens)
    torch.manual_seed(0)
    model = WhisperForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    assert can_pack(model), "without padding it can be"
    kwargs = left_padded([[5, 9, 5, 9, 5], [11], [3, 4, 5, 6, 7, 8]])
    kwargs |= {"max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(**kwargs)
    texts = [[token for token in ids if token] for ids in expected.tolist()]
    recording = Recording(Oracle(texts))
    with hf_smartspec.enabled(model):
        assert torch.equal(model.generate(**kwargs, assistant=recording), expected)
    assert recording.accepted > 0
