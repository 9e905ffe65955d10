"""Heads of EAGLE that draft: the tokens of plain decoding."""

import copy

import numpy as np
import pytest
import torch

import hf_smartspec
from hf_smartspec import Engine, FixedLength, SmartSpecConfig
from hf_smartspec.candidates.heads.eagle.heads import EagleHeads
from hf_smartspec.candidates.heads.feature_source import FeatureCandidates

from ...covering import exhaustive
from ...generate.helpers import prompts, tiny_llama
from ...models import new_model
from ...serving.helpers import TIMEOUT
from .by_heart import texts_of, trained_eagle
from .published_eagle import LAYOUTS, random_heads
from .test_medusa_source import GREEDY, LENGTHS, NUM_TOKENS, SAMPLED, tree_goodput

WAYS = {"greedy": GREEDY, "sampled": SAMPLED, "chunks": GREEDY | {"prefill_chunk_size": 4}}


@pytest.fixture(scope="module")
def target():
    model = tiny_llama(eos_token_id=None)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def folder(target, tmp_path_factory):
    path = tmp_path_factory.mktemp("eagle")
    texts = [text for lengths in (LENGTHS, LENGTHS[:1]) for text in texts_of(target, prompts(lengths), NUM_TOKENS)]
    trained_eagle(target, texts, steps=120).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def heads(target, folder):
    return EagleHeads.from_pretrained(folder, target)


@pytest.fixture(scope="module")
def plain(target):
    """What plain decoding says, by way and number of prompts."""
    known = {}

    def of(way, lengths):
        if (way, lengths) not in known:
            with hf_smartspec.enabled(target):
                known[way, lengths] = target.generate(**prompts(lengths), **WAYS[way], assistant="none")
        return known[way, lengths]

    return of


def test_engines_count_the_keys_and_values_of_heads(target, heads):
    """One layer: keys and values of all its heads."""
    config, bound = heads.config, 2**18
    per_token = 2 * config.num_key_value_heads * config.head_dim * heads.dtype.itemsize
    assert FeatureCandidates(heads).bytes_per_token() == per_token
    own, more = (Engine(target, assistant, max_kv_bytes=bound)._memory for assistant in ("none", heads))
    assert more.scheduler.max_tokens == bound // (own.bytes_per_token + per_token)


ASSISTANTS = {
    "folder": lambda folder, heads: folder,
    "heads": lambda folder, heads: heads,
    "chain": lambda folder, heads: SmartSpecConfig(folder, num_nodes=5),
    "tree": lambda folder, heads: SmartSpecConfig(folder, num_nodes=12, width=3),
    "sure": lambda folder, heads: SmartSpecConfig(FeatureCandidates(heads, confidence_threshold=0.3), num_nodes=5),
    "with suffix trees": lambda folder, heads: ["suffix", folder],
    "full trees": lambda folder, heads: SmartSpecConfig(folder, policy=tree_goodput()),
}


@pytest.mark.parametrize("name", ASSISTANTS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS[:1]])
def test_tokens_are_those_of_plain_decoding(target, folder, heads, plain, name, way, lengths):
    with hf_smartspec.enabled(target):
        output = target.generate(
            **prompts(lengths), **WAYS[way], assistant=ASSISTANTS[name](folder, heads), return_dict_in_generate=True
        )
    assert torch.equal(output.sequences, plain(way, lengths))
    assert 0 < output.statistics.accepted_tokens <= output.statistics.drafted_tokens
    if way != "sampled" and name in ("chain", "tree") and lengths is LENGTHS:
        assert output.statistics.accepted_tokens > 0.5 * NUM_TOKENS * len(lengths), "they know it by heart"


@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "beside tokens"])
def test_prompts_that_are_embeddings_are_decoded_plainly(target, heads, is_alone):
    """Heads go on from the tokens that hidden states stand for, which embeddings do not tell."""
    inputs = prompts(LENGTHS)
    ids = inputs.pop("input_ids")
    embeds = target.get_input_embeddings()(ids)
    embeds = embeds + 0.1 * torch.randn(embeds.shape, generator=torch.Generator().manual_seed(0))
    inputs |= {"inputs_embeds": embeds} | ({} if is_alone else {"input_ids": ids})
    expected = target.generate(**inputs, **GREEDY)
    with hf_smartspec.enabled(target):
        output = target.generate(**inputs, **GREEDY, assistant=heads, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected) and output.statistics.drafted_tokens == 0
    with Engine(target, heads) as engine, pytest.raises(ValueError, match="`inputs_embeds` cannot be served"):
        engine.add_request(ids[0].tolist(), inputs_embeds=embeds[:1], max_new_tokens=2)


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [("gemma2", "1"), ("falcon", "1"), ("phi", "3"), *exhaustive(("opt", "1"), ("gemma2", "3"), ("bloom", "3"))],
)
def test_random_heads_change_nothing(architecture, kind, tmp_path):
    """Of packed models and of those that are run row by row; scaled embeddings, and outputs with a bias."""
    model = new_model(architecture, eos_token_id=None)
    model.generation_config.eos_token_id = None
    vocab = model.config.vocab_size
    options = {"third": True, "layers": (1, 1, 0), "own_vocab": 80} if kind == "3" else {}
    LAYOUTS[kind](random_heads(model.config.hidden_size, vocab, **options), vocab, tmp_path)
    for options in (GREEDY, SAMPLED):
        with hf_smartspec.enabled(model):
            expected = model.generate(**prompts(LENGTHS), **options, assistant="none")
            output = model.generate(
                **prompts(LENGTHS),
                **options,
                assistant=SmartSpecConfig(str(tmp_path), num_nodes=6, width=2),
                return_dict_in_generate=True,
            )
        assert torch.equal(output.sequences, expected)
        assert output.statistics.drafted_tokens > NUM_TOKENS, "they were asked until the end"


@pytest.mark.parametrize("samples", [False, True])
def test_verification_by_rejection(target, folder, heads, samples):
    """It needs distributions of drafts that were sampled."""
    assistant = FeatureCandidates(heads, samples=True) if samples else folder
    config = SmartSpecConfig(assistant, num_nodes=4, verification="rejection")
    with hf_smartspec.enabled(target):
        if not samples:
            with pytest.raises(ValueError, match="rejection"):
                target.generate(**prompts(LENGTHS), **SAMPLED, assistant=config)
            return
        outputs = [
            target.generate(**prompts(LENGTHS), **SAMPLED, assistant=config, return_dict_in_generate=True)
            for _ in range(2)
        ]
        greedy = target.generate(**prompts(LENGTHS), **GREEDY, assistant=config)
        assert torch.equal(greedy, target.generate(**prompts(LENGTHS), **GREEDY, assistant="none"))
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert 0 < outputs[0].statistics.accepted_tokens < outputs[0].statistics.drafted_tokens


def test_heads_of_few_tokens_draft_those(target, plain):
    """Where the target samples, what they cannot draft is left to it."""
    ids = torch.arange(1, target.config.vocab_size, 2)
    own = trained_eagle(target, texts_of(target, prompts(LENGTHS), NUM_TOKENS), 30, ids)
    for way in ("greedy", "sampled"):
        source = Drafts(own)
        with hf_smartspec.enabled(target):
            output = target.generate(**prompts(LENGTHS), **WAYS[way], assistant=SmartSpecConfig(source, num_nodes=5))
        assert torch.equal(output, plain(way, LENGTHS))
        assert {token for tree in source.of.values() for token in tree.tokens.tolist()} <= set(ids.tolist())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_heads_of_another_dtype_draft(target, folder, plain, dtype):
    own = copy.deepcopy(EagleHeads.from_pretrained(folder, target)).to(dtype)
    with hf_smartspec.enabled(target):
        output = target.generate(**prompts(LENGTHS), **GREEDY, assistant=own, return_dict_in_generate=True)
    assert torch.equal(output.sequences, plain("greedy", LENGTHS)) and output.statistics.accepted_tokens > NUM_TOKENS


@pytest.mark.parametrize("kind", ["1", "3"])
def test_heads_of_a_target_that_is_quantized(kind, tmp_path):
    """Its own output serves heads that have none, as the map that it is."""
    model = new_model("llama", eos_token_id=None)
    model.generation_config.eos_token_id = None
    vocab = model.config.vocab_size
    options = {"third": True, "layers": (1, 1, 0), "own_vocab": 80} if kind == "3" else {}
    LAYOUTS[kind](random_heads(model.config.hidden_size, vocab, **options), vocab, tmp_path)
    hf_smartspec.quantize(model)
    with hf_smartspec.enabled(model):
        expected = model.generate(**prompts(LENGTHS), **GREEDY, assistant="none")
        config = SmartSpecConfig(str(tmp_path), num_nodes=4)
        output = model.generate(**prompts(LENGTHS), **GREEDY, assistant=config, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    assert output.statistics.drafted_tokens > NUM_TOKENS, "they were asked until the end"


# --- In an engine ----------------------------------------------------------------------------------------------------


class Drafts(FeatureCandidates):
    """Keeps what was drafted behind every text."""

    def __init__(self, heads, **options):
        super().__init__(heads, **options)
        self.of, self.rooms, self.reused, self.sizes = {}, {}, [], []

    def propose(self, request_ids, max_nodes, price=None):
        trees = super().propose(request_ids, max_nodes, price)
        self.sizes.append(len(trees))
        for name, tree, room in zip(request_ids, trees, max_nodes):
            state = self._states[name]
            text = (state.first_token, *state.tokens)
            self.of[text], self.rooms[text] = tree, room
        return trees

    def begin(self, request):
        num = super().begin(request)
        self.reused += [num] if request.num_cached else []
        return num

    @property
    def rows(self):
        return [] if self._forward is None else self._forward.cache.rows


def check_same_drafts(found, expected) -> int:
    """Of texts that both have drafted behind; how many these are."""
    both = found.keys() & expected.keys()
    for text in both:
        assert found[text].tokens.tolist() == expected[text].tokens.tolist()
        np.testing.assert_allclose(found[text].probs, expected[text].probs, rtol=1e-3, atol=1e-5)
    return len(both)


def answers(engine, texts, **options) -> list[list[int]]:
    """Without a pause, behind which nothing of earlier texts counts."""
    names = [engine.add_request(text, **GREEDY | options) for text in texts]
    outputs = [engine.get_result(name, timeout=TIMEOUT) for name in names]
    assert all(output.error is None for output in outputs)
    return [list(output.generated_tokens) for output in outputs]


def expected_of(target, texts):
    return [
        target.generate(torch.tensor([text]), attention_mask=torch.ones(1, len(text)), **GREEDY)[
            0, len(text) :
        ].tolist()
        for text in texts
    ]


@pytest.mark.parametrize("width", [*exhaustive([1]), 3])
def test_drafts_behind_prefixes_that_are_there_already_are_the_same(target, heads, width):
    """Prompts go on from earlier answers, in pieces; requests draft together, and some are cancelled."""
    texts = [row[mask.bool()].tolist() for row, mask in zip(*prompts((19, 15, 22)).values())]
    texts = [text + said for text, said in zip(texts, expected_of(target, texts))]
    known = {}
    for begins_with in (False, True):
        source = Drafts(heads, width=width)
        config = SmartSpecConfig(source, num_nodes=5 * width)
        with Engine(target, config, max_batch_size=4, max_prefill_tokens=7) as engine:
            if begins_with:
                answers(engine, [text[:-NUM_TOKENS] for text in texts])
            source.of.clear()
            dropped = engine.add_request(texts[0], max_new_tokens=300, eos_token_id=None)
            assert answers(engine, texts) == expected_of(target, texts)
            engine.cancel_request(dropped)
            engine.get_result(dropped, timeout=TIMEOUT)
            assert len(source.rows) <= 4 and max(source.sizes) >= 2
        # A request that ends has less room than another one of the same text that goes on.
        known[begins_with] = {text: tree for text, tree in source.of.items() if source.rooms[text] == 5 * width}
        assert (sum(source.reused) > sum(map(len, texts)) / 2) == begins_with
    assert check_same_drafts(known[True], known[False]) > 3


def test_requests_that_end_leave_nothing_behind(target, heads):
    generator = np.random.default_rng(0)
    source = Drafts(heads)
    config = SmartSpecConfig(source, num_nodes=3)
    sizes = []
    with Engine(target, config, max_batch_size=3) as engine:
        for _ in range(4):
            texts = [generator.integers(3, 40, 12).tolist() for _ in range(6)]
            answers(engine, texts, max_new_tokens=6)
            sizes.append((len(source.rows), len(source._ended), source._forward.cache.num_lines))
            assert not source._states
        assert max(size[0] for size in sizes) <= 4 and max(size[1] for size in sizes) <= 4
        assert sizes[-1][2] <= 2 * sizes[0][2], "memory does not grow with the number of requests"
    with hf_smartspec.enabled(target):
        source = Drafts(heads)
        target.generate(**prompts(LENGTHS), **GREEDY, assistant=source)
    assert not source._states and not source._ended and source._forward is None


def test_texts_of_requests_that_others_have_drafted_for_are_run_again(target, heads):
    text = list(range(3, 25))
    source = Drafts(heads)
    with Engine(target, SmartSpecConfig("none", policy=FixedLength(4)), max_batch_size=2) as engine:
        first = answers(engine, [text])
        again = answers(engine, [text], assistant=source)
        assert first == again == expected_of(target, [text])
    assert source.reused == [0] and len(source.of) > 3


def test_drafts_go_on_after_the_weights_have_changed(heads):
    """The text of running requests is run anew, from its beginning."""
    model = tiny_llama(eos_token_id=None)
    model.generation_config.eos_token_id = None
    source = Drafts(EagleHeads.from_pretrained(heads.name_or_path, model))
    text = list(range(3, 25))
    with Engine(model, SmartSpecConfig(source, num_nodes=3), max_batch_size=2) as engine:
        with engine.pause():
            name = engine.add_request(text, **GREEDY | {"max_new_tokens": 60})
        propose, calls = source.propose, []

        def changing(*args, **options):
            calls.append(1)
            if len(calls) == 4:
                with torch.no_grad():
                    model.model.layers[1].mlp.down_proj.weight.mul_(1.001)
            return propose(*args, **options)

        source.propose = changing
        output = engine.get_result(name, timeout=TIMEOUT)
        assert output.error is None and len(output.generated_tokens) == 60
    generated = [*text, *output.generated_tokens]
    behind = sorted(len(key) for key in source.of)
    assert behind[-1] > len(generated) - 8, "it drafts until the end"


def test_heads_of_another_target_are_refused_before_anything_is_run(target, folder, heads):
    other = new_model("llama", hidden_size=48)
    for assistant in (folder, heads, FeatureCandidates(heads)):
        with hf_smartspec.enabled(other), pytest.raises(ValueError, match=r"40 tokens|hidden size 48"):
            other.generate(**prompts(LENGTHS), **GREEDY, assistant=assistant)
