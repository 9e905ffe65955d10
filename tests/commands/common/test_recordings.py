"""What the benches ask: distinct prompts behind a past, which suffix trees remember, and replay on an engine."""

import numpy as np
import pytest

from hf_smartspec import SmartSpecConfig
from hf_smartspec.candidates import (
    DraftModelCandidates,
    FusedCandidates,
    PromptLookupCandidates,
    SuffixTreeCandidates,
)
from hf_smartspec.candidates.request import SourceRequest
from hf_smartspec.commands.common.arguments import UsageError
from hf_smartspec.commands.common.recordings import DataSet, Recording, Texts, answered, remember
from hf_smartspec.commands.common.replaying import ReplayEngine
from hf_smartspec.goodput import FixedLength
from tests.folders import byte_tokenizer
from tests.models import VOCAB_SIZE, new_model, noisy_model

END = 2


def new_texts(num):
    return [Texts([f"question {index % 6}"], f"answer {index}") for index in range(num)]


def random_recordings(num, seed=0, shared=0):
    """Responses repeat themselves; prompts begin alike."""
    rng = np.random.default_rng(seed)
    first = rng.integers(3, VOCAB_SIZE, shared)
    return [
        Recording(
            np.concatenate([first, rng.integers(3, VOCAB_SIZE, int(rng.integers(2, 30)))]),
            np.tile(rng.integers(3, VOCAB_SIZE, 5), int(rng.integers(1, 6))),
        )
        for _ in range(num)
    ]


def test_prompts_behind_the_past_are_distinct():
    tokenizer = byte_tokenizer()
    data = DataSet.of("data", new_texts(20), tokenizer, 5, 4, max_prompt=100, max_new_tokens=9)
    assert [tokenizer.decode(item.response) for item in data.past] == [f"answer {index}" for index in range(4)][:4]
    assert [tokenizer.decode(prompt) for prompt in data.prompts] == [f"question {n}" for n in (4, 5, 0, 1, 2)]
    assert [tokenizer.decode(item) for item in data.responses] == [f"answer {n}"[:9] for n in (4, 5, 6, 7, 8)]
    with pytest.raises(UsageError, match="has 20 requests, of which 20 leave none"):
        DataSet.of("data", new_texts(20), tokenizer, 5, 20, max_prompt=100, max_new_tokens=9)


def test_the_past_is_answered_by_the_target():
    model = new_model("llama")
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = END, 0
    past = random_recordings(3)
    found = answered(past, model, 6)
    for item, own in zip(past, found):
        prompt = item.prompt[None]
        expected = model.generate(model.dummy_inputs["input_ids"].new_tensor(prompt), do_sample=False, max_new_tokens=6)
        assert own.response.tolist() == expected[0, len(item.prompt) :].tolist()
        assert own.prompt is item.prompt


def test_suffix_trees_remember_in_their_namespace_and_others_do_not():
    past = [Recording(np.array([5, 6]), np.array([10, 11, 12, 13, 14]))]
    trees, fused = SuffixTreeCandidates(), FusedCandidates([SuffixTreeCandidates(), PromptLookupCandidates()])
    for source in (trees, fused):
        remember(source, past, "tenant")
        drafts = []
        for name in ("tenant", ""):
            source.begin(SourceRequest(name, np.array([9, 10, 11]), namespace=name))
            drafts.append(source.propose([name], [2])[0].best_chain().tokens.tolist())
        assert drafts == [[12, 13], []]
    remember(PromptLookupCandidates(), past)
    remember(DraftModelCandidates(new_model("llama")), past)


def new_source(name):
    draft = DraftModelCandidates(noisy_model("llama"), width=2)
    return draft if name == "draft" else SuffixTreeCandidates() if name == "suffix" else PromptLookupCandidates()


@pytest.mark.parametrize("name", ["draft", "suffix", "prompt_lookup"])
def test_an_engine_replays_what_was_recorded_on_its_fast_path(name, monkeypatch):
    monkeypatch.setattr(
        "hf_smartspec.decoding.verify.pick_next", lambda *_: pytest.fail("tokens are picked one by one")
    )
    items = random_recordings(9, shared=40)
    prompts, responses = [item.prompt for item in items], [item.response for item in items]
    config = SmartSpecConfig(new_source(name), policy=FixedLength(6))
    engine = ReplayEngine(new_model("llama"), config, 3, prompts, responses, END)
    outputs = engine.generate(prompts, max_new_tokens=40, eos_token_id=END, pad_token_id=0)
    for output, response in zip(outputs, responses):
        assert output.generated_tokens == [*response.tolist(), END] and output.finish_reason == "stop"
    counts = engine.statistics
    assert counts.drafted_tokens > 0
    if name == "suffix":
        assert counts.accepted_tokens > 20, "responses repeat themselves"
    if name == "draft":
        assert counts.acceptance_rate < 0.3, "random text is not what a model drafts"
