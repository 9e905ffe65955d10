"""Heads of EAGLE that draft: the tokens of plain decoding, and the same drafts whatever has happened before."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LogitsProcessorList

import hf_smartspec
from hf_smartspec import Committed, Engine, FixedLength, SmartSpecConfig
from hf_smartspec.candidates import growing
from hf_smartspec.candidates.heads.eagle import EagleHeads
from hf_smartspec.candidates.heads.feature_source import FeatureCandidates

from ...generate.helpers import prompts, tiny_llama
from ...models import new_model, shared_model
from .by_heart import texts_of, trained_eagle
from .published_eagle import LAYOUTS, random_heads
from .test_medusa_source import GREEDY, LENGTHS, NUM_TOKENS, SAMPLED

WAYS = {"greedy": GREEDY, "sampled": SAMPLED, "chunks": GREEDY | {"prefill_chunk_size": 4}}


@pytest.fixture(scope="module")
def target():
    model = tiny_llama(eos_token_id=None)
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def folder(target, tmp_path_factory):
    path = tmp_path_factory.mktemp("eagle")
    trained_eagle(target, texts_of(target, prompts(LENGTHS), NUM_TOKENS)).save_pretrained(path)
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


ASSISTANTS = {
    "folder": lambda folder, heads: folder,
    "heads": lambda folder, heads: heads,
    "chain": lambda folder, heads: SmartSpecConfig(folder, num_nodes=5),
    "tree": lambda folder, heads: SmartSpecConfig(folder, num_nodes=12, width=3),
    "sure": lambda folder, heads: SmartSpecConfig(FeatureCandidates(heads, confidence_threshold=0.3), num_nodes=5),
    "with suffix trees": lambda folder, heads: ["suffix", folder],
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


@pytest.mark.parametrize("kind", ["1", "3"])
@pytest.mark.parametrize("architecture", ["gemma2", "phi", "opt", "bloom", "falcon"])
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
        self.of, self.reused, self.sizes = {}, [], []

    def propose(self, request_ids, max_nodes, price=None):
        trees = super().propose(request_ids, max_nodes, price)
        self.sizes.append(len(trees))
        for name, tree in zip(request_ids, trees):
            state = self._states[name]
            self.of[(state.first_token, *state.tokens)] = tree
        return trees

    def reuse(self, request_id, length, earlier):
        self.reused.append(super().reuse(request_id, length, earlier))
        return self.reused[-1]

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
    outputs = [engine.get_result(name, timeout=120) for name in names]
    assert all(output.error is None for output in outputs)
    return [list(output.generated_tokens) for output in outputs]


def expected_of(target, texts):
    return [
        target.generate(torch.tensor([text]), attention_mask=torch.ones(1, len(text)), **GREEDY)[
            0, len(text) :
        ].tolist()
        for text in texts
    ]


@pytest.mark.parametrize("width", [1, 3])
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
            engine.get_result(dropped, timeout=60)
            assert len(source.rows) <= 4 and max(source.sizes) >= 2
        known[begins_with] = dict(source.of)
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
            assert not source._states and not source._coupling
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
        output = engine.get_result(name, timeout=60)
        assert output.error is None and len(output.generated_tokens) == 60
    generated = [*text, *output.generated_tokens]
    behind = sorted(len(key) for key in source.of)
    assert behind[-1] > len(generated) - 8, "it drafts until the end"


# --- Without a target ------------------------------------------------------------------------------------------------


def states_of(text, layers) -> dict[int, torch.Tensor]:
    """Hidden states `[n, hidden]` of a text's tokens, each the same behind the same text."""
    found = {layer: [] for layer in layers}
    for length in range(1, len(text) + 1):
        generator = torch.Generator().manual_seed(hash(tuple(text[:length])) % 2**40)
        for layer in sorted(found):
            found[layer].append(torch.randn(32, generator=generator))
    return {layer: torch.stack(lines) if lines else torch.empty(0, 32) for layer, lines in found.items()}


def step_of(text, start, num_new, end=None) -> Committed:
    """A text's hidden states from `start` on, and its last tokens, which have none."""
    end = len(text) - 1 if end is None else end
    states = {layer: item[start:] for layer, item in states_of(text[:end], (0, 1)).items()}
    return Committed(np.array(text[len(text) - num_new :], np.int64), hidden_states=states, start=start)


def drafts_anew(heads, text, num_nodes, width=2):
    """What a drafter says that is shown the whole text at once."""
    source = FeatureCandidates(heads, width=width)
    source.start("a", np.array(text[:-1]))
    source.observe("a", step_of(text, 0, 1))
    return source.propose(["a"], [num_nodes])[0]


def check_drafts(source, names, texts, num_nodes=5) -> None:
    for name, tree in zip(names, source.propose(names, [num_nodes] * len(names))):
        expected = drafts_anew(source.heads, texts[name], num_nodes, source.width)
        assert len(tree) == num_nodes and tree.tokens.tolist() == expected.tokens.tolist()
        assert tree.parents.tolist() == expected.parents.tolist()
        np.testing.assert_allclose(tree.probs, expected.probs, rtol=1e-3, atol=1e-5)


@pytest.fixture(scope="module")
def unlike():
    """Heads whose drafts depend on all that they are shown."""
    target = shared_model("llama")
    published = random_heads(32, target.config.vocab_size, third=True, layers=(1, 1, 0), own_vocab=80)
    tensors = dict(published.tensors) | {"d2t": published.token_ids - torch.arange(80)}
    config = LlamaConfig(hidden_size=32, intermediate_size=40, num_attention_heads=4, num_key_value_heads=2)
    return EagleHeads(config, tensors, (1, 1, 0), target).requires_grad_(False)


class World:
    """Requests of one source, whose texts are known."""

    def __init__(self, heads, width):
        self.source = FeatureCandidates(heads, width=width)
        self.texts, self.shown, self.ended, self.count = {}, {}, {}, 0

    def begin(self, data) -> None:
        """A prompt that goes on from another's text, or is new; keys and values of its beginning may be there."""
        self.count += 1
        name = f"request {self.count}"
        others = self.texts | self.ended
        earlier = data.draw(st.sampled_from([None, *others]))
        own = data.draw(st.lists(st.integers(3, 6), min_size=2, max_size=6))
        begins = others[earlier][: data.draw(st.integers(0, len(others[earlier])))] if earlier else []
        prompt = [*begins, *own]
        self.source.start(name, np.array(prompt))
        start = 0
        if earlier:
            length = min(len(begins), len(prompt) - 1)
            for _ in range(data.draw(st.integers(0, 2))):
                start = self.source.reuse(name, length, earlier)
                assert 0 <= start <= length
                length = data.draw(st.integers(0, start))
            if start and data.draw(st.booleans()):  # another source needs more
                start = self.source.reuse(name, length, earlier)
        self.texts[name], self.shown[name] = prompt, start

    def go_on(self, data, name) -> None:
        """A piece of the prompt, or tokens; at times the text is run anew from somewhere on."""
        text, start = self.texts[name], self.shown[name]
        if start and data.draw(st.integers(0, 5)) == 0:
            start = data.draw(st.integers(0, start))
        if start < len(text) - 1 and data.draw(st.booleans()):
            end = data.draw(st.integers(start + 1, len(text) - 1))
            self.source.observe(name, step_of(text, start, 0, end))
            self.shown[name] = end
            return
        new = data.draw(st.lists(st.integers(3, 6), min_size=1, max_size=3))
        self.texts[name] = [*text, *new]
        self.source.observe(name, step_of(self.texts[name], start, len(new)))
        self.shown[name] = len(self.texts[name]) - 1

    def draft(self, data) -> None:
        names = [name for name in self.texts if data.draw(st.booleans())]
        due = [name for name in names if self.shown[name] == len(self.texts[name]) - 1 and self.started(name)]
        if names:
            assert all(len(tree) == 0 for tree in self.source.propose(names, [0] * len(names)))
        if due:
            check_drafts(self.source, due, self.texts)

    def started(self, name) -> bool:
        return self.source._states[name].num_generated > 0

    def end(self, data) -> None:
        if self.texts:
            name = data.draw(st.sampled_from(sorted(self.texts)))
            self.source.stop(name)
            self.ended[name] = self.texts.pop(name)
            del self.shown[name]

    def forget(self, data) -> None:
        if self.ended:
            name = data.draw(st.sampled_from(sorted(self.ended)))
            self.source.forget(name)
            del self.ended[name]

    def play(self, data) -> None:
        if not self.texts:
            self.begin(data)
        act = data.draw(st.sampled_from(["begin", "end", "forget", "draft", "draft", *["go on"] * 5]))
        if act == "go on" and self.texts:
            self.go_on(data, data.draw(st.sampled_from(sorted(self.texts))))
        elif act != "go on":
            getattr(self, act)(data)
        rows = [] if self.source._forward is None else self.source._forward.cache.rows
        assert len(rows) == len(self.texts) + len(self.ended)


@settings(max_examples=30, deadline=None)
@given(data=st.data(), width=st.sampled_from([1, 2]))
def test_drafts_are_those_of_a_drafter_that_sees_the_whole_text_anew(unlike, data, width):
    world = World(unlike, width)
    for _ in range(data.draw(st.integers(5, 25))):
        world.play(data)
    for name in [*world.texts]:
        world.source.stop(name)
        world.ended[name] = world.texts.pop(name)
    for name in [*world.ended, "never started"]:
        world.source.stop("never started")
        world.source.forget(name)
    assert world.source._forward is None and not world.source._ended


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("seed", [None, 7])
def test_levels_at_once_are_those_level_by_level(unlike, monkeypatch, width, seed):
    """As on devices that are not waited for: drafts of texts of several lengths, and limits."""
    found = []
    for is_free in (True, False):
        monkeypatch.setattr(growing, "waits_are_free", lambda device, is_free=is_free: is_free)
        source = FeatureCandidates(unlike, width=width)
        trees = []
        for number, length in enumerate((9, 3, 14, 30)):
            text = [(7 * place + number) % 90 for place in range(length)]
            source.couple(number, LogitsProcessorList(), seed)
            source.start(number, np.array(text[:-1]))
            source.observe(number, step_of(text, 0, 1))
        for limits in ([12, 6, 9, 3], [3, 12, 1, 9]):
            trees += source.propose(range(4), limits)
        found.append(trees)
    for one, other in zip(*found):
        assert len(one) > 0 and one.tokens.tolist() == other.tokens.tolist()
        assert one.parents.tolist() == other.parents.tolist()
        np.testing.assert_allclose(one.probs, other.probs, rtol=1e-4, atol=1e-6)


def test_what_nobody_asks_for_takes_little_memory(unlike):
    """Of requests under load: what they are shown goes into their rows, sooner or later."""
    source = FeatureCandidates(unlike, width=2)
    text = [3, 4, 5]
    source.start("a", np.array(text[:2]))
    sizes = []
    rng = np.random.default_rng(0)
    states = {layer: [] for layer in (0, 1)}
    for number in range(700):
        start = len(states[0]) if number else 0
        step = Committed(
            np.array([text[-1]], np.int64),
            hidden_states={
                layer: torch.from_numpy(rng.standard_normal((2 if number == 0 else 1, 32))).float() for layer in (0, 1)
            },
            start=start,
        )
        for layer in (0, 1):
            states[layer] += list(step.hidden_states[layer])
        source.observe("a", step)
        sizes.append(source._states["a"].known.untyped_storage().nbytes())
        text.append(int(rng.integers(3, 80)))
    text.pop()
    assert max(sizes) < 300 * 3 * 32 * 4 and sizes[-1] < max(sizes)
    (tree,) = source.propose(["a"], [5])
    anew = FeatureCandidates(unlike, width=2)
    anew.start("b", np.array(text[:-1]))
    whole = {layer: torch.stack(lines) for layer, lines in states.items()}
    anew.observe("b", Committed(np.array(text[-1:]), hidden_states=whole, start=0))
    assert tree.tokens.tolist() == anew.propose(["b"], [5])[0].tokens.tolist()
    source.stop("a")
    assert source._ended["a"].known.untyped_storage().nbytes() <= 300 * 3 * 32 * 4


def test_what_was_left_out_is_not_drafted_behind(unlike):
    source = FeatureCandidates(unlike, width=2)
    text = [3, 4, 5, 6, 7, 8, 9]
    source.start("a", np.array(text[:5]))
    source.observe("a", step_of(text[:6], 2, 1))
    assert len(source.propose(["a"], [5])[0]) == 0
    source.observe("a", step_of(text, 5, 1))
    assert len(source.propose(["a"], [5])[0]) == 0
    text.append(10)
    source.observe("a", step_of(text, 0, 1))  # run anew
    check_drafts(source, ["a"], {"a": text})


def test_heads_of_another_target_are_refused_before_anything_is_run(target, folder, heads):
    other = new_model("llama", hidden_size=48)
    for assistant in (folder, heads, FeatureCandidates(heads)):
        with hf_smartspec.enabled(other), pytest.raises(ValueError, match=r"40 tokens|hidden size 48"):
            other.generate(**prompts(LENGTHS), **GREEDY, assistant=assistant)
