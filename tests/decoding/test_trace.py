"""Who produced each token: sources whose drafts are known to be right so far and no further."""

import numpy as np
import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import hf_smartspec
from hf_smartspec import DraftTree, Engine, FixedLength, RoutedCandidates, SmartSpecConfig, TreeCandidateGenerator
from hf_smartspec.candidates import FusedCandidates, StagedCandidates, SuffixTreeCandidates

from ..generate.helpers import VOCAB_SIZE, noisy_copy, prompts, tiny_llama
from ..serving.helpers import TIMEOUT
from ..strategies import path_to

PROMPT, LENGTH = [3, 4, 5], 24
GREEDY = {"max_new_tokens": LENGTH, "eos_token_id": None}


class Scripted(TreeCandidateGenerator):
    """
    Drafts a chain whose first tokens are right and whose next is wrong; where none is right, nothing.

    Args:
        plain (list of `int`): What the target generates.
        right (`Callable`): From the number of generated tokens to how many of the next ones it knows.
    """

    default_num_nodes = 8

    def __init__(self, label, plain, right, prompt=PROMPT, is_autoregressive=False):
        self.label, self.plain, self.right, self.prompt_len = label, plain, right, len(prompt)
        self.is_autoregressive = is_autoregressive
        self.num = {}

    def start(self, request_id, prompt):
        self.num[request_id] = len(prompt) - self.prompt_len

    def observe(self, request_id, tokens):
        self.num[request_id] += len(tokens)

    def stop(self, request_id):
        self.num.pop(request_id, None)

    def propose(self, request_ids, max_nodes):
        return [self.draft(self.num[name], limit) for name, limit in zip(request_ids, max_nodes)]

    def draft(self, place, limit):
        known = self.plain[place : place + self.right(place)]
        if not known:
            return DraftTree.empty()
        following = self.plain[place + len(known)] if place + len(known) < len(self.plain) else 0
        tokens = np.array([*known, (following + 1) % VOCAB_SIZE], np.int64)
        return DraftTree.chain(tokens, np.full(len(tokens), 0.9, np.float32)).most_likely(limit)


def _expected(sources, length=LENGTH):
    """By hand: at each place the first source that knows the next token, as far as any of them knows."""
    owners = []
    while len(owners) < length:
        place = len(owners)
        reach = [min(source.right(place), length - place - 1) for source in sources]  # the last one needs no draft
        for depth in range(max(reach)):
            owners.append(next(source.label for source, far in zip(sources, reach) if far > depth))
        owners.append(None)
    return owners[:length]


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.fixture(scope="module")
def plain(model):
    return _plain(model)


def _plain(model, **settings):
    ids = torch.tensor([PROMPT])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY | settings)
    return output[0, len(PROMPT) :].tolist()


def _output(model, assistant, tag=None, **settings):
    config = SmartSpecConfig(assistant, num_nodes=8)
    with Engine(model, config) as engine:
        return engine.get_result(engine.add_request(PROMPT, trace=True, tag=tag, **GREEDY | settings), timeout=TIMEOUT)


def _check(output, plain):
    """What holds whatever drafts."""
    assert output.generated_tokens == plain
    sources = output.token_sources
    assert len(sources) == len(plain)
    assert sum(source is not None for source in sources) == output.statistics.accepted_tokens
    done = 0
    for step in output.traced_steps:
        assert step.start == done
        path = [step.tokens[node] for node in step.accepted]
        assert path == plain[done : done + len(path)] and step.num_generated == len(path) + 1
        assert [step.sources[node] for node in step.accepted] + [None] == sources[done : done + step.num_generated]
        assert all(step.is_verified[node] for node in step.accepted)
        assert [step.parents[node] for node in step.accepted] == [-1, *step.accepted[:-1]][: len(path)]
        assert len(step.tokens) == len(step.parents) == len(step.path_probs) == len(step.sources)
        done += step.num_generated
    assert done == len(plain)
    assert sum(sum(step.is_verified) for step in output.traced_steps) == output.statistics.drafted_tokens


def test_a_token_belongs_to_the_source_that_drafted_it(model, plain):
    source = Scripted("one", plain, lambda place: place % 4)
    output = _output(model, source)
    _check(output, plain)
    assert output.token_sources == _expected([source])
    assert {None, "one"} == set(output.token_sources)


@pytest.mark.parametrize("make", ["fused", "staged", "nested"])
def test_each_of_several_sources_gets_its_own(model, plain, make):
    # "early" knows the first token at even places, "far" four of them at every third place.
    early = Scripted("early", plain, lambda place: 1 - place % 2)
    far = Scripted("far", plain, lambda place: 4 * (place % 3 == 0), is_autoregressive=make == "staged")
    assistant = [early, far]
    if make == "nested":
        assistant = StagedCandidates([FusedCandidates([early]), FusedCandidates([far])], threshold=100.0)
    if make == "staged":
        assistant = StagedCandidates([early, far], threshold=100.0)  # asked everywhere
    output = _output(model, assistant)
    _check(output, plain)
    assert output.token_sources == _expected([early, far])
    assert {None, "early", "far"} == set(output.token_sources)


def test_members_that_the_loop_does_not_know_are_named(model, plain):
    early = Scripted("early", plain, lambda place: 1 - place % 2)
    far = Scripted("far", plain, lambda place: 4 * (place % 3 == 0))
    staged = StagedCandidates([early, far], threshold=100.0)
    output = _output(model, FusedCandidates([staged]))
    _check(output, plain)
    assert output.token_sources == _expected([early, far])


def test_routed_sources_are_named_with_their_route(model, plain):
    drafters = {
        "left": Scripted("even", plain, lambda place: 2 * (place % 2 == 0)),
        "right": [Scripted("odd", plain, lambda place: place % 2), SuffixTreeCandidates()],
    }
    for tag, label in (("left", "left: even"), ("right", "right: odd")):
        output = _output(model, RoutedCandidates(drafters), tag=tag)
        _check(output, plain)
        assert label in output.token_sources and set(output.token_sources) <= {label, f"{tag}: suffix", None}


def test_trees_say_what_was_verified_and_accepted(model, plain):
    class Narrow(FixedLength):
        """Verifies two nodes of what is drafted."""

        def select(self, rows, trees):
            return [tree.most_likely(2) for tree in trees]

    class Bushy(Scripted):
        """A wrong sibling before every right node."""

        def draft(self, place, limit):
            right, nodes = super().draft(place, limit).tokens[:-1], []
            for depth, token in enumerate(right.tolist()):
                parent = 2 * depth - 1 if depth else -1
                nodes += [((token + 1) % VOCAB_SIZE, parent, 0.2), (token, parent, 0.7)]
            columns = [np.array(column) for column in zip(*nodes)]
            return DraftTree(*columns[:2], columns[2].astype(np.float32)) if nodes else DraftTree.empty()

    source = Bushy("bushy", plain, lambda place: 3)
    with Engine(model, SmartSpecConfig(source, policy=Narrow(8))) as engine:
        output = engine.get_result(engine.add_request(PROMPT, trace=True, **GREEDY), timeout=TIMEOUT)
    _check(output, plain)
    assert any(not all(step.is_verified) for step in output.traced_steps)
    assert output.token_sources[:6] == ["bushy", "bushy", None] * 2
    for step in output.traced_steps:
        tree = DraftTree(np.array(step.tokens), np.array(step.parents), np.ones(len(step.tokens), np.float32))
        assert all(set(path_to(tree, node)) <= set(np.flatnonzero(step.is_verified)) for node in step.accepted)
        for node, parent in enumerate(step.parents):
            assert step.path_probs[node] <= (step.path_probs[parent] if parent >= 0 else 1.0)


def test_tokens_behind_a_stop_are_nobodys(model, plain):
    source = Scripted("all", plain, lambda place: 7)
    end = plain[10]
    cut = plain[: plain.index(end) + 1]
    output = _output(model, source, eos_token_id=end)
    _check(output, cut)
    assert output.finish_reason == "stop" and output.token_sources[-1] is None, "it would have come free anyway"


def test_streams_tell_it_of_what_they_hold(model, plain):
    source = Scripted("one", plain, lambda place: place % 4)
    with Engine(model, SmartSpecConfig(source, num_nodes=8)) as engine:
        name = engine.add_request(PROMPT, streaming=True, trace=True, **GREEDY)
        outputs = list(engine.request_id_iter(name))
    expected = _expected([source])
    for output in outputs:
        assert output.token_sources == expected[: len(output.generated_tokens)]
        assert sum(step.num_generated for step in output.traced_steps) == len(output.generated_tokens)


def test_nobody_asks_nobody_is_told(model, plain):
    source = Scripted("one", plain, lambda place: place % 4)
    with Engine(model, SmartSpecConfig(source, num_nodes=8)) as engine:
        output = engine.get_result(engine.add_request(PROMPT, **GREEDY), timeout=TIMEOUT)
    assert output.generated_tokens == plain and output.token_sources is None and output.traced_steps is None


class Stateful(LogitsProcessor):
    """Of a kind that nobody knows: it is called along the accepted path only, rows in lockstep."""

    def __call__(self, input_ids, scores):
        return scores - 0.01 * torch.nn.functional.one_hot(input_ids[:, -1], scores.shape[1])


@pytest.mark.parametrize("processors", [[], [Stateful()]])
def test_rows_of_generate(model, processors):
    inputs = prompts([3, 7, 5])
    settings = GREEDY | {"logits_processor": LogitsProcessorList(processors)}
    plain = model.generate(**inputs, **settings)
    draft = noisy_copy(model)
    with hf_smartspec.enabled(model):
        config = SmartSpecConfig([SuffixTreeCandidates(), draft], num_nodes=4, trace=True)
        assert torch.equal(model.generate(**inputs, **settings, assistant=config), plain)
        traces, statistics = model.smartspec_statistics.last_traces, model.smartspec_statistics.last
        model.generate(**inputs, **settings, assistant="suffix")
        assert model.smartspec_statistics.last_traces is None
    sources = [source for trace in traces for source in trace.token_sources]
    assert len(traces) == 3 and len(sources) == 3 * LENGTH
    assert sum(source is not None for source in sources) == statistics.accepted_tokens > 0
    assert "draft_model" in sources and set(sources) <= {"draft_model", "suffix", None}
    for row, trace in zip(plain[:, inputs["input_ids"].shape[1] :].tolist(), traces):
        for step in trace.steps:
            path = [step.tokens[node] for node in step.accepted]
            assert path == row[step.start : step.start + len(path)]


def test_a_source_that_does_not_know_its_own_drafts_costs_itself_only(model, plain):
    class Confused(Scripted):
        def drafted_by(self, request_id, tree):
            raise RuntimeError("who?")

    output = _output(model, Confused("one", plain, lambda place: place % 4))
    _check(output, plain)
    assert set(output.token_sources) == {None, "one"}, "what it drafted before it was dropped"
