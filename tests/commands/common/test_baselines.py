"""REST and PIA, the sources that SSSD compares with."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hf_smartspec
from hf_smartspec.candidates import Datastore
from hf_smartspec.commands.common.baselines import PIACandidates, rest
from hf_smartspec.commands.common.recordings import Recording
from hf_smartspec.commands.replay.loop import Replayer, Tally
from hf_smartspec.commands.replay.sources import parse_specs

from ...candidates.text.datastore.test_source import ask, nodes, twin
from ...generate.helpers import tiny_llama

texts = st.lists(st.integers(0, 2), min_size=2, max_size=20)
BRANCH_LEN = 3


def branches(text):
    """Count how often each path of up to `BRANCH_LEN` tokens follows each token."""
    counts = Counter()
    for at, token in enumerate(text):
        for length in range(1, min(BRANCH_LEN, len(text) - at - 1) + 1):
            counts[token, *text[at + 1 : at + 1 + length]] += 1
    return counts


@given(st.lists(texts, max_size=3), texts)
def test_pia_s_tries_count_outputs_and_the_prompt(outputs, prompt):
    """A draft with room for all holds what followed the last two tokens, or the last one where that is little."""
    source = PIACandidates(branch_len=BRANCH_LEN)
    source.add_outputs([np.array(text) for text in outputs])
    tree = ask_plain(source, prompt, 100)
    known, own = sum(map(branches, outputs), Counter()), branches(prompt)
    for end in (tuple(prompt[-2:]), tuple(prompt[-1:])):
        expected = {path[len(end) :] for path in known | own if path[: len(end)] == end and len(path) > len(end)}
        if len(expected) + 1 >= BRANCH_LEN:
            break
    assert {path for path, _ in nodes(tree)} == expected
    tree.check_integrity(3)


def ask_plain(source, text, limit):
    source.start("one", np.array(text, np.int64))
    tree = source.propose(["one"], [limit])[0]
    source.stop("one")
    return tree


def test_pia_s_prompts_come_before_outputs_but_leave_them_half_of_a_draft():
    source = PIACandidates(branch_len=2)
    source.add_outputs([np.array([1, token]) for token in (4, 4, 4, 5, 5, 6)])
    tree = ask_plain(source, [1, 7, 1, 7, 1, 8, 1], 4)
    assert {path for path, _ in nodes(tree)} == {(4,), (5,), (7,), (7, 1)}
    assert len(ask_plain(source, [9, 1], 100)) == 3, "prompts are forgotten with their requests"


def test_pia_keeps_outputs_and_prunes_what_is_rare():
    source = PIACandidates(branch_len=2, max_output_nodes=3)
    source.start("a", np.array([1, 2]))
    source.observe("a", np.array([3, 1, 2, 3]))
    source.stop("a")
    assert [path for path, _ in nodes(ask_plain(source, [2], 9))] == [(3,), (3, 1)]
    source.add_outputs([np.array([2, 3, 4]), np.array([2, 5, 6])])
    assert [path for path, _ in nodes(ask_plain(source, [2], 9))] == [(3,)]


@given(st.lists(texts, max_size=4), texts)
def test_rest_takes_the_first_continuations_of_the_longest_match(docs, text):
    source = rest(Datastore.from_documents(docs, vocab_size=3))
    expected = twin(docs, text, 100, 16, 5000, 1, 10, True)
    assert [path for path, _ in nodes(ask(source, text, 100))] == [path for path, _, _ in expected]


def test_they_have_names_in_replays(tmp_path):
    text = np.tile([5, 6, 7, 8], 12)
    Datastore.from_documents([text]).save(path := tmp_path / "text.datastore")
    for name in ("pia", "pia:num_nodes=8", f"rest:{path}", "sssd", f"sssd:{path},num_nodes=8"):
        (spec,), tally = parse_specs(name), Tally.of(1)
        for _ in Replayer(spec.build(), spec.num_nodes).run([Recording(text[:9], text[9:])], tally):
            pass
        assert tally.summary()["accepted_per_step"] > 1, name


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.7, "seed": 3}])
def test_drafts_of_pia_change_no_token(sampling):
    model = hf_smartspec.enable(tiny_llama())
    inputs = {"input_ids": torch.tensor([[5, 6, 5, 6, 5], [8, 9, 8, 9, 8]]), "max_new_tokens": 24, **sampling}
    expected = model.generate(**inputs, assistant="none")
    output = model.generate(**inputs, assistant=PIACandidates(branch_len=2), return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected) and output.statistics.drafted_tokens > 0
