"""Decoders behind an encoder, from `generate`: the plain tokens, whatever drafts."""

import copy

import numpy as np
import pytest
import torch
from transformers import WhisperForCausalLM
from transformers.generation import BaseStreamer

import hf_smartspec
from hf_smartspec import RoutedCandidates, SmartSpecConfig
from hf_smartspec.decoding.loop import DecodingLoop
from hf_smartspec.target_model.compat import CACHE
from hf_smartspec.target_model.encoded import EncodedForward

from ..covering import exhaustive, part_of
from ..models import ENCODER_DECODER, SPEECH, VOCAB_SIZE, new_model, noisy_model, shared_model
from ..sources import Oracle as Known
from ..sources import WithDecoys
from ..target_model.encoded.helpers import encoder_inputs
from ..watching import Watching
from .helpers import Oracle, Spy, both, noisy_copy

FAMILIES = [*ENCODER_DECODER, *SPEECH]
pytestmark = pytest.mark.usefixtures("deprecated_by_itself")  # Whisper's `generate`
SUMMARY = torch.tensor([[11, 12, 13, 14, 15, 16, 17, 18, 19, 20]])


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


def batch(architecture, seed, num_rows):
    rng = np.random.default_rng(seed)
    return encoder_inputs(architecture, rng, rng.integers(1, 20, num_rows).tolist())


def accepted_by(model, assistant, **kwargs):
    """How many drafted tokens came true, of a call that gives the plain tokens."""
    plain, output = both(model, assistant, return_dict_in_generate=True, **kwargs)
    assert torch.equal(plain.sequences, output.sequences)
    return output.statistics.accepted_tokens


# --- The plain tokens -------------------------------------------------------------------------------------------------

ASSISTANTS = {
    "lookup": lambda draft: SmartSpecConfig("prompt_lookup", num_nodes=4),
    "suffix": lambda draft: SmartSpecConfig("suffix", num_nodes=4),
    "draft": lambda draft: SmartSpecConfig(draft, num_nodes=3),
    "tree": lambda draft: SmartSpecConfig(draft, num_nodes=8, width=3),
    "staged": lambda draft: SmartSpecConfig(["suffix", draft], num_nodes=4),
}


@pytest.mark.parametrize("assistant", ["suffix", "draft", "tree", *exhaustive(["lookup"], ["staged"])])
@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize("seed", [None, 3], ids=["greedy", "sampled"])
def test_batches(family, assistant, num_rows, seed):
    model, draft = shared_model(family), noisy_model(family)
    given = ASSISTANTS[assistant](draft)
    plain, output = both(model, given, seed, **batch(family, num_rows, num_rows), max_new_tokens=18)
    assert torch.equal(plain, output)


def random_arguments(rng, num_rows, speaks):
    """Settings of `generate` that decide about tokens, some of them by the text, or by its length."""
    choices = {
        "decoder_input_ids": torch.from_numpy(rng.integers(3, VOCAB_SIZE, (num_rows, int(rng.integers(1, 9))))),
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 3,
        "eos_token_id": rng.integers(2, VOCAB_SIZE, 12).tolist(),
        "suppress_tokens": [4, 9, 20],
        "prefix_allowed_tokens_fn": lambda row, ids: list(range(2, 60 + row)),
        "temperature": 0.7,
        "top_k": 30,
        "forced_bos_token_id": 7,
        "min_new_tokens": 5,
    }
    # Whisper's own `generate` makes its decoder's prompt and its processors.
    names = ["repetition_penalty", "no_repeat_ngram_size", "top_k"] if speaks else list(choices)
    return {name: choices[name] for name in names if rng.random() < 0.4}


@pytest.mark.parametrize("seed", range(6))
def test_random_settings(family, seed):
    rng = np.random.default_rng(seed)
    num_rows = int(rng.integers(1, 5))
    kwargs = batch(family, seed, num_rows) | random_arguments(rng, num_rows, family in SPEECH)
    assistant = ASSISTANTS[list(ASSISTANTS)[rng.integers(len(ASSISTANTS))]](noisy_model(family))
    sampling = None if seed % 2 else seed
    plain, output = both(shared_model(family), assistant, sampling, **kwargs, max_new_tokens=int(rng.integers(1, 25)))
    assert torch.equal(plain, output)


@pytest.mark.parametrize("family", ENCODER_DECODER)
def test_what_is_right_is_accepted_at_once(family):
    model = shared_model(family)
    kwargs = batch(family, 1, 1) | {"max_new_tokens": 16, "eos_token_id": None}
    plain = model.generate(**kwargs)
    spy = Spy(Oracle(plain))
    _, output = both(model, SmartSpecConfig(spy, num_nodes=8), **kwargs)
    assert torch.equal(plain, output)
    assert spy.accepted == spy.drafted >= 12


@pytest.mark.parametrize("family", part_of(ENCODER_DECODER, "t5", "bart", "t5gemma"))
def test_several_sequences_of_each_text(family):
    kwargs = batch(family, 2, 3) | {"max_new_tokens": 9, "num_return_sequences": 2, "top_k": 40}
    plain, output = both(shared_model(family), noisy_model(family), seed=4, **kwargs)
    assert torch.equal(plain, output) and len(output) == 6


@pytest.mark.parametrize("architecture", ["t5", "umt5", "bart"])
def test_dictionaries_hold_what_plain_decoding_returns(architecture):
    wanted = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}
    kwargs = batch(architecture, 5, 4) | wanted | {"eos_token_id": list(range(2, 12)), "max_new_tokens": 20}
    plain, output = both(shared_model(architecture), noisy_model(architecture), **kwargs)
    assert torch.equal(plain.sequences, output.sequences)
    for name in ("logits", "scores"):
        torch.testing.assert_close(output[name], plain[name], atol=1e-4, rtol=1e-4)
    ours, theirs = output[CACHE], plain[CACHE]
    assert type(ours) is type(theirs)
    for name in ("self_attention_cache", "cross_attention_cache"):
        layers = getattr(ours, name).layers, getattr(theirs, name).layers
        assert len(layers[0]) == len(layers[1])
        for own, expected in zip(*layers):
            torch.testing.assert_close(own.keys, expected.keys, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(own.values, expected.values, atol=1e-4, rtol=1e-4)


def test_rows_share_a_forward(family, monkeypatch):
    model, rows = shared_model(family), []
    run = EncodedForward._run
    monkeypatch.setattr(EncodedForward, "_run", lambda self, item: rows.append(len(item.rows)) or run(self, item))
    with hf_smartspec.enabled(model):
        model.generate(**batch(family, 0, 4), max_new_tokens=5, assistant="prompt_lookup")
    assert max(rows) == 4


def test_texts_that_nobody_may_read_run_row_by_row():
    """Where all is masked, plain decoding reads an average of everything; a draft reads something."""
    kwargs = batch("t5", 0, 2)
    kwargs["attention_mask"][1] = 0
    for assistant in ("prompt_lookup", noisy_model("t5")):
        plain, output = both(shared_model("t5"), assistant, **kwargs, max_new_tokens=8)
        assert torch.equal(plain, output)


def test_padded_prompts_of_the_decoder():
    ids, mask = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    kwargs = batch("t5", 0, 2) | {"decoder_input_ids": ids, "decoder_attention_mask": mask}
    plain, output = both(shared_model("t5"), "prompt_lookup", **kwargs, max_new_tokens=8)
    assert torch.equal(plain, output)


def test_without_enabling_the_model():
    """Nobody knows then what the encoder has read; drafts come from the decoder's text."""
    model, kwargs = shared_model("bart"), batch("bart", 4, 3) | {"max_new_tokens": 30}
    output = model.generate(**kwargs, custom_generate=hf_smartspec.decode, assistant="prompt_lookup")
    assert torch.equal(output, model.generate(**kwargs))


def test_columns_are_streamed_as_ever():
    class Columns(BaseStreamer):
        def __init__(self):
            self.columns = []

        def put(self, value):
            self.columns.append(value.tolist())

        def end(self):
            self.columns.append("end")

    model, kwargs = shared_model("t5"), batch("t5", 4, 1) | {"max_new_tokens": 12}
    plain, ours = Columns(), Columns()
    model.generate(**kwargs, streamer=plain)
    with hf_smartspec.enabled(model):
        model.generate(**kwargs, streamer=ours, assistant=noisy_model("t5"))
    assert ours.columns == plain.columns and ours.columns[-1] == "end"


@pytest.mark.parametrize("architecture", ["t5", "bart"])
def test_sources_see_the_decoders_hidden_states_and_scores(architecture):
    model = shared_model(architecture)
    ids = torch.tensor([[9, 8, 7, 6, 5]] * 3)
    prompts = {"decoder_input_ids": torch.tensor([[0, 5, 6], [0, 7, 8], [0, 9, 10]])}
    kwargs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 12, **prompts}
    plain = model.generate(**kwargs)
    watching = Watching(WithDecoys(Known(plain.tolist()), seed=1), layers=(-1, 0, 1))
    _, output = both(model, watching, **kwargs)
    assert torch.equal(plain, output) and watching.num_accepted > 12
    with torch.no_grad():
        watching.check(model, encoder_outputs=model.get_encoder()(input_ids=ids[:1], return_dict=True))


# --- What drafts read -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["prompt_lookup", "suffix", "auto"])
def test_answers_that_repeat_what_was_read_are_found_there(preset):
    """A copying model, made by its processors: each token is followed by the one that follows in the source text."""
    model = new_model("t5")
    kwargs = {"input_ids": SUMMARY, "decoder_input_ids": torch.tensor([[0, 11]]), "max_new_tokens": 8}

    def next_of(row, ids):
        return [min(int(ids[-1]) + 1, 20)]

    config = SmartSpecConfig(preset, num_nodes=4)
    assert accepted_by(model, config, **kwargs, prefix_allowed_tokens_fn=next_of) >= 5


def test_references_of_rows_are_their_own():
    """What one row's encoder reads, another row's draft does not come from."""
    model, seen = new_model("t5"), {}

    class Listening(Oracle):
        def begin(self, request):
            seen[request.request_id] = [text.tolist() for text in request.references]
            super().begin(request)

    kwargs = {"input_ids": torch.tensor([[0, 5, 6], [7, 8, 9]]), "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]])}
    source = Listening(model.generate(**kwargs, max_new_tokens=4))
    given = SmartSpecConfig(source, references=[[30, 31]])
    with hf_smartspec.enabled(model):
        model.generate(**kwargs, max_new_tokens=4, assistant=given)
    assert list(seen.values()) == [[[30, 31], [5, 6]], [[30, 31], [7, 8, 9]]]


def test_drafts_read_what_the_target_reads(family):
    """A copy of the target is always right, so that it must have read the same."""
    model = shared_model(family)
    draft = copy.deepcopy(model)
    kwargs = batch(family, 7, 4) | {"max_new_tokens": 13, "eos_token_id": None}
    with hf_smartspec.enabled(model):
        plain = model.generate(**kwargs)
        output = model.generate(**kwargs, assistant=SmartSpecConfig(draft, num_nodes=3))
        statistics = model.smartspec_statistics.last
    assert torch.equal(plain, output)
    assert statistics.accepted_tokens == statistics.drafted_tokens > 0


@pytest.mark.parametrize("architecture", ["t5", "whisper"])
def test_drafts_are_loaded_with_their_encoders(architecture, tmp_path):
    model = shared_model(architecture)
    noisy_model(architecture).save_pretrained(tmp_path)
    plain, output = both(model, str(tmp_path), **batch(architecture, 7, 2), max_new_tokens=6)
    assert torch.equal(plain, output)


def test_the_drafts_encoder_reads_all_rows_at_once(monkeypatch):
    model, draft, sizes = shared_model("bart"), new_model("bart", seed=1), []
    draft.get_encoder().register_forward_hook(lambda module, args, output: sizes.append(len(output[0])))
    with hf_smartspec.enabled(model):
        model.generate(**batch("bart", 0, 5), max_new_tokens=6, assistant=SmartSpecConfig(draft, num_nodes=2))
    assert sizes == [5]


def test_drafts_without_an_encoder_look_at_the_targets():
    """As Distil-Whisper loaded as `WhisperForCausalLM`."""
    model = shared_model("whisper")
    draft = WhisperForCausalLM(copy.deepcopy(model.config)).eval()
    draft.load_state_dict(noisy_copy(model, 0.0).state_dict(), strict=False)
    kwargs = batch("whisper", 2, 3) | {"max_new_tokens": 12}
    with hf_smartspec.enabled(model):
        plain = model.generate(**kwargs)
        output = model.generate(**kwargs, assistant=SmartSpecConfig(draft, num_nodes=3))
        statistics = model.smartspec_statistics.last
    assert torch.equal(plain, output)
    assert statistics.accepted_tokens == statistics.drafted_tokens > 0


def test_decoders_that_read_nothing_draft_too():
    model = shared_model("t5")
    plain, output = both(model, SmartSpecConfig(shared_model("llama"), num_nodes=3), **batch("t5", 0, 3))
    assert torch.equal(plain, output)


def test_drafts_of_new_weights_read_anew():
    """Keys and values of encoder outputs are the old weights' as well."""
    model, draft = shared_model("t5"), new_model("t5", seed=9)
    source = hf_smartspec.DraftModelCandidates(draft, num_nodes=3)
    kwargs = batch("t5", 3, 3) | {"max_new_tokens": 12, "eos_token_id": None}
    step = DecodingLoop.step

    def becoming_the_target(loop):
        if loop.statistics.steps > 4 and source.weights_version == 0:
            draft.load_state_dict(model.state_dict())
            source.weights_version += 1
            loop.statistics.drafted_tokens = loop.statistics.accepted_tokens = 0
        return step(loop)

    with pytest.MonkeyPatch.context() as patch, hf_smartspec.enabled(model):
        plain = model.generate(**kwargs)
        patch.setattr(DecodingLoop, "step", becoming_the_target)
        output = model.generate(**kwargs, assistant=source)
        statistics = model.smartspec_statistics.last
    assert torch.equal(plain, output) and source.weights_version == 1
    assert statistics.accepted_tokens == statistics.drafted_tokens > 0


def test_routers_read_what_the_encoder_has_read():
    """A text's language, or topic, stands there; its drafter reads the rows that go to it."""
    model, seen = shared_model("t5"), []

    def shorter(ids):
        seen.append(ids.tolist())
        return "copy" if len(ids) < 5 else "other"

    source = RoutedCandidates({"copy": copy.deepcopy(model), "other": new_model("t5", seed=3)}, shorter)
    ids = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 0, 0, 0, 0], [13, 14, 15, 16, 17, 18]])
    kwargs = {"input_ids": ids, "attention_mask": (ids != 0).long(), "max_new_tokens": 9, "eos_token_id": None}
    plain, output = both(model, SmartSpecConfig(source, num_nodes=3), **kwargs)
    assert torch.equal(plain, output)
    assert seen == [[5, 6, 7, 8, 9, 10], [11, 12], [13, 14, 15, 16, 17, 18]]
    found = source.statistics()
    assert found["copy"].requests == 1 and found["other"].requests == 2
    assert found["copy"].tokens / found["copy"].steps > found["other"].tokens / found["other"].steps


# --- What cannot be ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draft", "reason"),
    [
        (lambda: new_model("whisper"), "its encoder reads `input_features`, and the target's `input_ids`"),
        (lambda: new_model("m2m_100"), "the attention of M2M100ForConditionalGeneration cannot be packed"),
        (lambda: new_model("t5", vocab_size=90), "a vocabulary of 90 tokens and the target one of 97"),
    ],
)
def test_drafts_that_cannot_read_are_refused(draft, reason):
    with hf_smartspec.enabled(shared_model("t5")) as model, pytest.raises(ValueError, match=reason):
        model.generate(**batch("t5", 0, 1), assistant=draft(), max_new_tokens=2)


def test_speech_drafts_that_cannot_hear_are_refused():
    model = shared_model("whisper")
    config = copy.deepcopy(model.config)
    config.d_model = 16
    with hf_smartspec.enabled(model):
        with pytest.raises(ValueError, match="features of 4 mel bins, and the target's of 8"):
            model.generate(**batch("whisper", 0, 1), assistant=new_model("whisper", num_mel_bins=4), max_new_tokens=2)
        with pytest.raises(ValueError, match="encoder outputs of 16 dimensions, and those of the target have 32"):
            model.generate(**batch("whisper", 0, 1), assistant=WhisperForCausalLM(config), max_new_tokens=2)


def test_a_draft_needs_what_its_encoder_reads():
    model, kwargs = shared_model("t5"), batch("t5", 0, 2)
    outputs = model.get_encoder()(**kwargs, return_dict=True)
    kwargs = {"encoder_outputs": outputs, "attention_mask": kwargs["attention_mask"], "max_new_tokens": 4}
    with hf_smartspec.enabled(model):
        with pytest.raises(ValueError, match=r"drafts by what its own encoder reads.*pass the encoder's inputs"):
            model.generate(**kwargs, assistant=noisy_model("t5"))
        expected = model.generate(**kwargs)
        assert torch.equal(model.generate(**kwargs, assistant="suffix"), expected)
    with hf_smartspec.enabled(model, noisy_model("t5")):  # a default gives way
        assert torch.equal(model.generate(**kwargs), expected)
