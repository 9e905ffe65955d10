"""transformers' generators that need the target's hidden states draft here what they draft in its own loop."""

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, MuseGlimmerAssistantConfig
from transformers.generation.candidate_generator import (
    CandidateGenerator,
    DFlashTokenCandidateGenerator,
    MTPCandidateGenerator,
)
from transformers.modeling_layers import MtpModel
from transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant import MuseGlimmerAssistantModel

import hf_smartspec
from hf_smartspec import Committed, Engine, FixedLength, SmartSpecConfig
from hf_smartspec.candidates import WrappedCandidates

from ...cases import left_padded
from ...models import new_model, shared_model
from ...serving.helpers import TIMEOUT

# Shorter ones than there are layers for multi-token prediction fail in transformers itself.
PROMPTS = [[5, 9, 5, 9, 5], [11, 60, 30, 8], [3, 4, 5, 6, 7, 3, 4]]
LENGTH = 20


class _Helped:
    """
    Notes what the generator drafts behind each text, and then puts the right tokens in the place of some of them, so
    that drafts are accepted in part.
    """

    def get_candidates(self, input_ids, **kwargs):
        candidates, logits = super().get_candidates(input_ids, **kwargs)
        text, draft = input_ids[0].tolist(), candidates[0, input_ids.shape[1] :]
        if len(draft):
            self.notes.drafts[tuple(text)] = draft.tolist()
            known = next(ids for ids in self.notes.known if ids[: len(text)] == text)
            num = min(len(text) % (len(draft) + 1), len(known) - len(text))
            draft[:num] = torch.tensor(known[len(text) : len(text) + num])
        return candidates, logits


class _Notebook:
    """What was drafted behind each text, by all copies of a generator."""

    def __init__(self, known):
        self.known, self.drafts = known, {}


class _DFlash(_Helped, DFlashTokenCandidateGenerator):
    pass


class _MTP(_Helped, MTPCandidateGenerator):
    pass


def spread(model):
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return model.eval().requires_grad_(False)


def dflash():
    """Of the outputs of both layers, the last one's behind the norm, as transformers numbers them."""
    model = shared_model("llama")
    config = MuseGlimmerAssistantConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, max_position_embeddings=512, sliding_window=64, block_size=4, mask_token_id=3,
        target_layer_ids=[0, 1], bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    assistant = spread(MuseGlimmerAssistantModel(config))
    settings = GenerationConfig(max_length=512)
    return model, lambda: _DFlash(assistant, model.get_input_embeddings(), model.lm_head, settings)


def mtp(num_layers: int, monkeypatch):
    model = new_model("deepseek_v3", num_mtp_layers=num_layers)
    layers = MtpModel(model, num_layers)
    spread(layers.layers)
    monkeypatch.setattr(MtpModel, "from_pretrained", lambda *args, **kwargs: layers)
    return model, lambda: _MTP(model, GenerationConfig(do_sample=False), {})


@pytest.fixture(params=["dflash", "mtp 1", "mtp 3"])
def served(request, monkeypatch):
    return dflash() if request.param == "dflash" else mtp(int(request.param[-1]), monkeypatch)


def plain(model, prompt) -> list[int]:
    ids = torch.tensor([prompt])
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=LENGTH)[0].tolist()


def by_transformers(model, build, prompt, known) -> dict:
    """What its own loop drafts."""
    generator = build()
    generator.notes = _Notebook(known)
    model._get_candidate_generator = lambda **kwargs: generator
    try:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=LENGTH, prompt_lookup_num_tokens=3
        )
    finally:
        del model._get_candidate_generator
    assert output[0].tolist() in known
    return generator.notes.drafts


def test_drafts_are_those_of_transformers(served):
    model, build = served
    known = [plain(model, prompt) for prompt in PROMPTS]
    generator = build()
    generator.notes = _Notebook(known)
    inputs = left_padded(PROMPTS)
    with hf_smartspec.enabled(model):
        output = model.generate(**inputs, max_new_tokens=LENGTH, assistant=WrappedCandidates(generator, num_layers=2))
        direct = model.generate(**inputs, max_new_tokens=LENGTH, assistant=generator, return_dict_in_generate=True)
    assert [row[-LENGTH:] for row in output.tolist()] == [text[-LENGTH:] for text in known]
    assert torch.equal(direct.sequences, output) and direct.statistics.accepted_tokens > LENGTH
    for prompt in PROMPTS:
        expected = by_transformers(model, build, prompt, known)
        ours = {text: draft for text, draft in generator.notes.drafts.items() if list(text[: len(prompt)]) == prompt}
        common = expected.keys() & ours.keys()
        assert len(common) >= len(expected) - 1 >= 5, "transformers drafts once more, behind the last token but one"
        assert {text: ours[text] for text in common} == {text: expected[text] for text in common}


def test_prompts_in_pieces_and_rows_that_are_not_asked(served):
    model, build = served
    known = [plain(model, prompt) for prompt in PROMPTS]
    generator = build()
    generator.notes = _Notebook(known)
    with Engine(model, SmartSpecConfig(generator, policy=_EverySecond()), max_prefill_tokens=2) as engine:
        names = [engine.add_request(prompt, max_new_tokens=LENGTH) for prompt in PROMPTS]
        outputs = [engine.get_result(name, timeout=TIMEOUT) for name in names]
        assert engine.statistics.accepted_tokens > 0
    assert [prompt + output.generated_tokens for prompt, output in zip(PROMPTS, outputs)] == known
    drafts = generator.notes.drafts
    for prompt in PROMPTS:
        longest = max((text for text in drafts if list(text[: len(prompt)]) == prompt), key=len)
        again = build()
        again.notes = _Notebook(known)
        shadow = _replayed(model, again, prompt, [text for text in drafts if list(text[: len(prompt)]) == prompt])
        assert shadow[longest] == drafts[longest] and shadow == {text: drafts[text] for text in shadow}


class _EverySecond(FixedLength):
    """Asks for drafts at every second step."""

    def __init__(self):
        super().__init__(4)
        self.num_steps = 0

    def max_nodes(self, rows, stage, trees):
        self.num_steps += 1
        limits = super().max_nodes(rows, stage, trees)
        return [limit if self.num_steps % 2 else 0 for limit in limits]


def _replayed(model, generator: CandidateGenerator, prompt: list[int], texts: list[tuple[int, ...]]) -> dict:
    """The same steps once more by hand, with hidden states of one plain forward, for the generator alone."""
    length = len(prompt)
    for text in sorted(texts, key=len):
        with torch.no_grad():
            states = model(input_ids=torch.tensor([text[:-1]]), output_hidden_states=True)
        first = 0 if length == len(prompt) else length - 1
        states.hidden_states = tuple(item[:, first:] for item in states.hidden_states)
        generator.get_candidates(
            torch.tensor([text]),
            model_kwargs={"position_ids": torch.arange(len(text))[None], "attention_mask": None},
            model_outputs=states,
            is_first_iteration=False,
            n_last_matches=len(text) - length - 1,
        )
        length = len(text)
    return generator.notes.drafts


def test_a_text_that_is_run_anew_begins_anew():
    """After a change of the target's weights, a generator's own keys and values are of the new hidden states only."""
    model, build = dflash()
    generator = build()
    known = [plain(model, PROMPTS[0])]
    generator.notes = _Notebook([[*known[0], *[0] * 90]])
    wrapped = WrappedCandidates(generator, num_layers=2)
    wrapped.start("a", np.array(PROMPTS[0]))
    states = {layer: torch.randn(6, 32) for layer in wrapped.hidden_layers}
    token = np.array(known[0][5:6])
    wrapped.observe("a", Committed(token, hidden_states={k: v[:5] for k, v in states.items()}))
    (first,) = wrapped.propose(["a"], [4])
    own = wrapped._sequences["a"].generator
    wrapped.observe(
        "a", Committed(np.array(known[0][6:7]), hidden_states={k: v[5:] for k, v in states.items()}, start=5)
    )
    wrapped.propose(["a"], [4])
    assert len(first) and wrapped._sequences["a"].generator is own and own.cache.get_seq_length() == 6 + 4
    wrapped.observe("a", Committed(np.array(known[0][7:8]), hidden_states={k: torch.randn(7, 32) for k in states}))
    assert len(wrapped.propose(["a"], [4])[0])
    anew = wrapped._sequences["a"].generator
    assert anew is not own and anew.cache.get_seq_length() == 7 + 4
