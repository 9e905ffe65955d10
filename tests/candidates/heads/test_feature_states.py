"""The same drafts whatever has happened before: texts in pieces, run anew, or begun by other requests'."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LogitsProcessorList

from hf_smartspec import BlockCandidates, BlockDrafter, Committed
from hf_smartspec.candidates.heads import hidden_states
from hf_smartspec.candidates.heads.eagle.heads import EagleHeads
from hf_smartspec.candidates.heads.feature_source import FeatureCandidates
from hf_smartspec.candidates.models import growing
from hf_smartspec.candidates.request import SourceRequest

from ...covering import examples
from ...models import shared_model
from .blocks.published import random_drafter, z_lab
from .published_eagle import random_heads


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


def source_with(heads, width):
    return (BlockCandidates if isinstance(heads, BlockDrafter) else FeatureCandidates)(heads, width=width)


def drafts_anew(heads, text, num_nodes, width=2):
    """What a drafter says that is shown the whole text at once."""
    source = source_with(heads, width)
    source.start("a", np.array(text[:-1]))
    source.observe("a", step_of(text, 0, 1))
    return source.propose(["a"], [num_nodes])[0]


def check_drafts(source, names, texts, num_nodes=5, width=2) -> None:
    for name, tree in zip(names, source.propose(names, [num_nodes] * len(names))):
        expected = drafts_anew(source.heads, texts[name], num_nodes, width)
        assert len(tree) == num_nodes and tree.tokens.tolist() == expected.tokens.tolist()
        assert tree.parents.tolist() == expected.parents.tolist()
        np.testing.assert_allclose(tree.probs, expected.probs, rtol=1e-3, atol=1e-5)


@pytest.fixture(scope="module")
def unlike_blocks(tmp_path_factory):
    target, folder = shared_model("llama"), tmp_path_factory.mktemp("blocks")
    z_lab(random_drafter(32, target.config.vocab_size, outputs=(-1, 0)), target.config.vocab_size, folder)
    return BlockDrafter.from_pretrained(folder, target)


@pytest.fixture(scope="module")
def unlike():
    """Heads whose drafts depend on all that they are shown."""
    target = shared_model("llama")
    published = random_heads(32, target.config.vocab_size, third=True, layers=(1, 1, 0), own_vocab=80)
    tensors = dict(published.tensors) | {"d2t": published.token_ids - torch.arange(80)}
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    config = LlamaConfig(hidden_size=32, intermediate_size=40, **sizes)
    return EagleHeads(config, tensors, (1, 1, 0), target).requires_grad_(False)


class World:
    """Requests of one source, whose texts are known."""

    def __init__(self, heads, width):
        self.source, self.width = source_with(heads, width), width
        self.texts, self.shown, self.ended, self.requests, self.count = {}, {}, {}, {}, 0

    def begin(self, data) -> None:
        """A prompt that goes on from another's text, or is new; keys and values of its beginning may be there."""
        self.count += 1
        name = f"request {self.count}"
        others = self.texts | self.ended
        earlier = data.draw(st.sampled_from([None, *others]))
        own = data.draw(st.lists(st.integers(3, 6), min_size=2, max_size=6))
        begins = others[earlier][: data.draw(st.integers(0, len(others[earlier])))] if earlier else []
        prompt = [*begins, *own]
        length = data.draw(st.integers(0, min(len(begins), len(prompt) - 1))) if earlier else 0
        self.requests[name] = request = SourceRequest(
            name, np.array(prompt), num_cached=length, shares_with=earlier if length else None
        )
        start = self.source.begin(request)
        assert 0 <= start <= length
        if start and data.draw(st.booleans()):  # another source needs more
            start = data.draw(st.integers(0, start))
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
            check_drafts(self.source, due, self.texts, width=self.width)

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
            self.release(name)
            del self.ended[name]

    def release(self, name) -> None:
        for callback in self.requests.pop(name).on_release:
            callback()

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


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data(), width=st.sampled_from([1, 2]), is_block=st.booleans())
def test_drafts_are_those_of_a_drafter_that_sees_the_whole_text_anew(unlike, unlike_blocks, data, width, is_block):
    world = World(unlike_blocks if is_block else unlike, width)
    for _ in range(data.draw(st.integers(5, 25))):
        world.play(data)
    for name in [*world.texts]:
        world.source.stop(name)
        world.ended[name] = world.texts.pop(name)
    world.source.stop("never started")
    for name in world.ended:
        world.release(name)
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
            source.begin(SourceRequest(number, np.array(text[:-1]), processors=LogitsProcessorList(), seed=seed))
            source.observe(number, step_of(text, 0, 1))
        for limits in ([12, 6, 9, 3], [3, 12, 1, 9]):
            trees += source.propose(range(4), limits)
        found.append(trees)
    for one, other in zip(*found):
        assert len(one) > 0 and one.tokens.tolist() == other.tokens.tolist()
        assert one.parents.tolist() == other.parents.tolist()
        np.testing.assert_allclose(one.probs, other.probs, rtol=1e-4, atol=1e-6)


@pytest.fixture(params=["eagle", "blocks"])
def any_unlike(request, unlike, unlike_blocks):
    return {"eagle": unlike, "blocks": unlike_blocks}[request.param]


def test_what_nobody_asks_for_takes_little_memory(any_unlike, monkeypatch):
    """What requests under load are shown, lines of all rows' states, goes into their rows sooner or later."""
    monkeypatch.setattr(hidden_states, "_MOST_BYTES", 2**16)  # fewer than those of the least number of tokens
    source = source_with(any_unlike, 2)
    text = [3, 4, 5]
    source.start("a", np.array(text[:2]))
    sizes = []
    rng = np.random.default_rng(0)
    states, most_bytes = {layer: [] for layer in (0, 1)}, 300 * 3 * 32 * 4

    def num_bytes(state):
        return sum(piece.untyped_storage().nbytes() for piece in state.pieces)

    for number in range(700):
        start = len(states[0]) if number else 0
        of_all = {layer: torch.from_numpy(rng.standard_normal((64, 32))).float() for layer in (0, 1)}
        own = {layer: lines[7 : 8 if number else 9] for layer, lines in of_all.items()}
        step = Committed(np.array([text[-1]], np.int64), hidden_states=own, start=start)
        for layer in (0, 1):
            states[layer] += list(step.hidden_states[layer])
        source.observe("a", step)
        state = source._states["a"]
        assert sum(map(len, state.pieces)) == state.num_known - state.start == len(states[0]) - state.start
        sizes.append(num_bytes(state))
        text.append(int(rng.integers(3, 80)))
    text.pop()
    assert max(sizes) < most_bytes and sizes[-1] < max(sizes)
    (tree,) = source.propose(["a"], [5])
    anew = source_with(any_unlike, 2)
    anew.start("b", np.array(text[:-1]))
    whole = {layer: torch.stack(lines) for layer, lines in states.items()}
    anew.observe("b", Committed(np.array(text[-1:]), hidden_states=whole, start=0))
    assert tree.tokens.tolist() == anew.propose(["b"], [5])[0].tokens.tolist()
    source.stop("a")
    assert num_bytes(source._ended["a"]) <= most_bytes


def test_what_was_left_out_is_not_drafted_behind(any_unlike):
    source = source_with(any_unlike, 2)
    text = [3, 4, 5, 6, 7, 8, 9]
    source.start("a", np.array(text[:5]))
    source.observe("a", step_of(text[:6], 2, 1))
    assert len(source.propose(["a"], [5])[0]) == 0
    source.observe("a", step_of(text, 5, 1))
    assert len(source.propose(["a"], [5])[0]) == 0
    text.append(10)
    source.observe("a", step_of(text, 0, 1))  # run anew
    check_drafts(source, ["a"], {"a": text})


def test_prompts_that_are_there_already_but_for_their_end(any_unlike):
    """Drafts come before the target has run that; where its newest hidden state has not been kept, none do."""
    source = source_with(any_unlike, 2)
    text = [3, 4, 5, 6, 7, 8, 9, 10]
    source.start("earlier", np.array(text[:-1]))
    source.observe("earlier", step_of(text, 0, 1))
    source.propose(["earlier"], [5])
    source.stop("earlier")
    for length in range(2, len(text) + 1):
        request = SourceRequest(length, np.array(text[:length]), num_cached=length - 1, shares_with="earlier")
        assert source.begin(request) == length - 1
        tree = source.propose([length], [5])[0]
        if len(tree):
            assert tree.tokens.tolist() == drafts_anew(any_unlike, text[:length], 5).tokens.tolist()
        longer = [*text[:length], 11]
        source.observe(length, step_of(longer, length - 1, 1))
        check_drafts(source, [length], {length: longer})
