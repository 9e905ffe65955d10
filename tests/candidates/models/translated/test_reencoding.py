"""Drafts of any of the draft's tokens, encoded anew in the target's: against encoding the whole text."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LogitsProcessorList, PreTrainedTokenizerFast

import hf_smartspec
from hf_smartspec.candidates.models.translated.reencoding import Reencoding
from hf_smartspec.candidates.models.translated.source import TranslatedDraftCandidates
from hf_smartspec.candidates.models.translated.translation import Translation
from hf_smartspec.candidates.request import SourceRequest
from hf_smartspec.drafts.tree import DraftTree, check_trees

from ....covering import examples
from ....generate.helpers import tiny_llama
from ....models import new_model
from ....serving.helpers import TIMEOUT
from ....strategies import path_to
from ..checks import next_scores
from .pairs import TEXTS, TOKENIZERS, byte_level, character_tokenizer, sentence_piece
from .test_translation import PAIRS, between, ids_of, words

JOINING = (byte_level, lambda: byte_level(300))  # the target has tokens that the draft has not


def text_of(translation: Translation, ids):
    text = translation.begin(np.array(ids, np.int64))
    translation.read([text])
    return text


def written(translation: Translation, text, tree: DraftTree, limit: int = 100) -> DraftTree:
    (found,) = Reencoding(translation).to_target([text], [tree], [limit])
    return found


def behind(translation: Translation, text, string: str) -> list[int]:
    """What is missing of a string, in the draft's tokens; nothing where it would cut the text differently."""
    tokens = translation.assistant_tokenizer(string).input_ids
    return tokens[len(text.tokens) :] if tokens[: len(text.tokens)] == text.tokens else []


# --- Trees ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("one", "other"), PAIRS)
@settings(max_examples=examples(30))
@given(words, st.integers(0, 200), st.data())
def test_a_chain_is_what_the_whole_text_would_be(one, other, string, place, data):
    target, draft = TOKENIZERS[one](), TOKENIZERS[other]()
    translation, ids = between(target, draft), ids_of(target, string)
    place %= len(ids)
    text = text_of(translation, ids[:place])
    assume(text.is_complete and target.decode(ids[:place]))
    tokens = behind(translation, text, string)
    assume(tokens)
    probs = data.draw(st.lists(st.sampled_from([0.25, 0.5, 1.0]), min_size=len(tokens), max_size=len(tokens)))
    chain = DraftTree.chain(tokens, probs)
    found = written(translation, text, chain)
    assert found.is_chain and found.tokens.tolist() == ids[place:].tolist()
    assert found.path_probs[-1] == pytest.approx(chain.path_probs[-1])
    shown = [draft.decode([*text.tokens, *tokens[: num + 1]], skip_special_tokens=True) for num in range(len(tokens))]
    ends = [len(part.rstrip("\ufffd")) for part in shown]
    for num, prob in enumerate(found.path_probs):
        reached = target.decode(ids[: place + num + 1])
        if not reached.endswith("\ufffd"):
            assert prob == pytest.approx(chain.path_probs[next(n for n, end in enumerate(ends) if end >= len(reached))])


def test_tokens_that_the_draft_does_not_have_are_reached():
    target, draft = (make() for make in JOINING)
    translation = between(target, draft)
    whole = ids_of(target, TEXTS[0])
    missing = translation._draft_ids[whole] < 0
    assert missing[4:].sum() > 5
    text = text_of(translation, whole[:4])
    found = written(translation, text, DraftTree.chain(behind(translation, text, TEXTS[0])))
    assert found.tokens.tolist() == whole[4:].tolist()


def test_branches_share_what_they_begin_with():
    target, draft = (make() for make in JOINING)
    translation = between(target, draft)
    text = text_of(translation, ids_of(target, "the quick"))
    first, second = (draft(way, add_special_tokens=False).input_ids for way in (" fox jumps", " fox things"))
    num = next(number for number, (one, other) in enumerate(zip(first, second)) if one != other)
    tokens = [*first, *second[num:]]
    parents = [*range(-1, len(first) - 1), num - 1, *range(len(first), len(tokens) - 1)]
    probs = [1.0] * len(first) + [0.5] * (len(second) - num)
    probs[num] = 0.4
    tree = DraftTree(np.array(tokens), np.array(parents), np.array(probs, np.float32))
    found = written(translation, text, tree)
    ways = {target.decode(found.tokens[path_to(found, node)]) for node in set(range(len(found))) - {*found.parents}}
    assert ways == {" fox jumps", " fox things"}
    assert len(found) < sum(len(target(way).input_ids) for way in ways)
    names = [target.decode(found.tokens[path_to(found, node)]) for node in range(len(found))]
    likely = {name: prob for name, prob in zip(names, found.path_probs.tolist())}
    assert likely[" fox"] == 1 and likely[" fox jumps"] == pytest.approx(0.4)
    assert likely[" fox things"] == pytest.approx(0.5 ** (len(second) - num))
    small = written(translation, text, tree, limit=2)
    assert len(small) == 2 and small.parents[0] == -1
    assert sorted(small.path_probs, reverse=True) == pytest.approx(sorted(found.path_probs, reverse=True)[:2])
    assert len(written(translation, text, tree, limit=0)) == 0


def test_one_text_in_several_ways_is_as_likely_as_all_of_them():
    target, draft = character_tokenizer("abc"), character_tokenizer("cba", joined=["ab"])
    translation = between(target, draft)
    a, ab, b, c = draft.convert_tokens_to_ids(["a", "ab", "b", "c"])
    probs = np.array([0.5, 0.2, 0.5, 0.4, 0.5], np.float32)
    tree = DraftTree(np.array([a, ab, b, c, c]), np.array([-1, -1, 0, 0, 1]), probs)
    found = written(translation, text_of(translation, ids_of(target, "c")), tree)
    names = [target.decode(found.tokens[path_to(found, node)]) for node in range(len(found))]
    likely = {name: prob for name, prob in zip(names, found.path_probs.tolist())}
    assert likely == {
        "a": pytest.approx(0.7), "ab": pytest.approx(0.45), "abc": pytest.approx(0.1), "ac": pytest.approx(0.2)
    }  # fmt: skip


CHARACTERS_AND_PAIR = character_tokenizer("abc"), character_tokenizer("cba", joined=["ab"])


def test_what_is_said_in_parts_beside_the_whole_is_not_cut_from_its_beginning():
    """Rounded, the sum of all ways to say "ab" may exceed the likelihood of its "a", of which it is a part."""
    target, draft = CHARACTERS_AND_PAIR
    translation = between(target, draft)
    ab, a, b = draft.convert_tokens_to_ids(["ab", "a", "b"])
    tree = DraftTree(np.array([ab, a, b]), np.array([-1, -1, 1]), np.array([1.0, 1e-3, 1.0], np.float32))
    text = text_of(translation, ids_of(target, "c"))
    assert target.decode(written(translation, text, tree, limit=1).tokens) == "a"
    assert written(translation, text, tree).probs.tolist() == [1, 1]


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 3), st.floats(0, 1)), max_size=12), st.integers(0, 8))
def test_whatever_the_draft_says_is_a_tree_within_the_limit(nodes, limit):
    target, draft = CHARACTERS_AND_PAIR
    translation = between(target, draft)
    tokens = [int(draft.convert_tokens_to_ids(["ab", "a", "b", "c"])[kind]) for _, kind, _ in nodes]
    parents = [place % (number + 1) - 1 for number, (place, _, _) in enumerate(nodes)]
    assume(len({*zip(parents, tokens)}) == len(nodes))
    tree = DraftTree(
        np.array(tokens, np.int64), np.array(parents, np.int64), np.array([p for *_, p in nodes], np.float32)
    )
    found = written(translation, text_of(translation, ids_of(target, "c")), tree, limit)
    check_trees([found], len(target))
    assert ((found.probs >= 0) & (found.probs <= 1)).all()
    whole = written(translation, text_of(translation, ids_of(target, "c")), tree)
    assert len(found) == min(limit, len(whole))


def test_a_word_that_the_target_has_begun_goes_on_by_itself():
    """It has chosen not to say it in one token, which the text with its draft would be."""
    target, draft = character_tokenizer("abcd", joined=["ab"]), character_tokenizer("dcba")
    translation = between(target, draft)
    text = text_of(translation, ids_of(target, "da"))
    found = written(translation, text, DraftTree.chain(draft("bab").input_ids))
    assert target.convert_ids_to_tokens(found.tokens) == ["b", "ab"]
    target, draft = sentence_piece(), byte_level(300)  # where a space is put before every text
    translation, begun = between(target, draft), target.convert_tokens_to_ids(["▁", "t", "h", "e", "▁", "q"])
    assert begun != target("the q", add_special_tokens=False).input_ids
    found = written(translation, text_of(translation, begun), DraftTree.chain(draft("uick fox").input_ids))
    assert target.decode([*begun, *found.tokens]) == "the quick fox"


def test_special_tokens_end_a_branch_and_are_kept_where_both_have_them():
    target, draft = byte_level(500), byte_level(300)
    translation = between(target, draft)
    text = text_of(translation, ids_of(target, "the lazy"))
    end, fox = draft.convert_tokens_to_ids("<|end|>"), draft(" fox").input_ids
    found = written(translation, text, DraftTree.chain([*fox, end, *fox], [0.5] * (2 * len(fox) + 1)))
    assert found.tokens.tolist() == [*target(" fox").input_ids, target.convert_tokens_to_ids("<|end|>")]
    assert found.path_probs[-1] == pytest.approx(0.5 ** (len(fox) + 1))
    assert target.decode(written(translation, text, DraftTree.chain([end])).tokens) == "<|end|>"
    other = character_tokenizer("the lazyfox")
    translation = Translation(other, draft, len(other), len(draft))
    text = text_of(translation, ids_of(other, "the lazy"))
    assert len(written(translation, text, DraftTree.chain([end, *fox]))) == 0


def test_half_a_character_is_no_draft():
    target, draft = sentence_piece(), byte_level(300)
    translation = between(target, draft)
    text = text_of(translation, target("so", add_special_tokens=False).input_ids)
    tokens = draft("€").input_ids
    assert len(tokens) > 2
    assert len(written(translation, text, DraftTree.chain(tokens[:-1]))) == 0
    assert target.decode(written(translation, text, DraftTree.chain(tokens)).tokens) == "€"


@pytest.mark.parametrize("before", ["so a", "so 中文", "so 日本語中文中文"])
def test_characters_of_several_bytes_are_whole_wherever_they_are_cut(before):
    """A decoder that shows no byte of a row with half a character in it still shows the characters before that."""
    target, draft = byte_level(500), sentence_piece()
    translation = between(target, draft)
    text = text_of(translation, target(before).input_ids)
    tokens = behind(translation, text, before + "書物")
    assert len(tokens) == 6  # bytes
    for num in range(7):
        found = written(translation, text, DraftTree.chain(tokens[:num]))
        assert target.decode(found.tokens) == "書物"[: num // 3]


def test_tokens_that_the_target_has_no_room_for_end_a_branch():
    """A tokenizer may have been given tokens that the model has not."""
    target, draft = copy.deepcopy(byte_level(500)), byte_level(300)
    size = len(target)
    target.add_tokens([" fox jumps"])
    translation = Translation(target, draft, size, len(draft))
    text = text_of(translation, target("the quick").input_ids)
    tokens = behind(translation, text, "the quick fox jumps")
    assert target("the quick fox jumps").input_ids[-1] == size
    assert len(written(translation, text, DraftTree.chain(tokens))) == 0


def test_tokenizers_that_cut_spaces_from_places_know_what_lies_across_the_end():
    target, draft = copy.deepcopy(byte_level(500)), byte_level(300)
    target.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    translation = between(target, draft)
    text = text_of(translation, target("the ").input_ids)
    found = written(translation, text, DraftTree.chain(draft("fox").input_ids))
    assert target.decode(found.tokens) == "fox"


# --- The source -------------------------------------------------------------------------------------------------------


def greedy(model, tokens: list[int], num: int) -> list[int]:
    own = list(tokens)
    for _ in range(num):
        own.append(int(next_scores(model, own).argmax()))
    return own[len(tokens) :]


@pytest.mark.parametrize(("one", "other"), PAIRS)
@pytest.mark.parametrize("architecture", ["llama", "bloom"])
def test_drafts_are_what_the_draft_says_whatever_was_accepted(one, other, architecture):
    """In any of its tokens, in a cache from which it takes back what the target's words have changed."""
    target, draft = TOKENIZERS[one](), TOKENIZERS[other]()
    model = new_model(architecture, vocab_size=len(draft))
    translation = between(target, draft)
    source, rng = TranslatedDraftCandidates(model, translation), np.random.default_rng(3)
    material = ids_of(target, TEXTS[0] + TEXTS[2])
    texts = {"a": material[:9].tolist(), "b": material[:2].tolist()}
    for name, ids in texts.items():
        source.start(name, np.array(ids))
    num_said = 0
    for step in range(8):
        names = [name for name in texts if rng.random() < 0.8]
        for name, tree in zip(names, source.propose(names, [4] * len(names))):
            ids = texts[name]
            if target.decode(ids).endswith("\ufffd"):
                assert len(tree) == 0
            else:
                text = text_of(translation, ids)
                said = greedy(model, text.tokens, 4)
                expected = written(translation, text, DraftTree.chain(said), 4)
                assert tree.tokens.tolist() == expected.tokens.tolist() and len(tree) <= 4
                num_said += len(tree)
            tokens = [*tree.tokens[: rng.integers(0, len(tree) + 1)].tolist(), int(material[(len(ids) + step) % 40])]
            ids += tokens
            source.observe(name, np.array(tokens))
    assert num_said > 10
    for name in texts:
        source.stop(name)


def test_rows_keep_what_the_target_has_accepted():
    """Tokens that were run once are not run again, though the text that they stand in is encoded anew."""
    target, draft = character_tokenizer("abcdefgh "), character_tokenizer(" hgfedcba")
    source = TranslatedDraftCandidates(new_model("llama", vocab_size=len(draft)), between(target, draft))
    source.start("a", ids_of(target, "abc def"))
    state = source._states["a"]
    for _ in range(4):
        (tree,) = source.propose(["a"], [6])
        before = state.row.length
        source.observe("a", tree.tokens)
        source._prepare()
        assert len(tree) > 3 and state.row.length == before + len(tree) - 1


@pytest.mark.parametrize(
    "sampling", [{}, {"do_sample": True, "temperature": 0.8, "seed": 3}], ids=["greedy", "sampled"]
)
def test_requests_that_sample_beside_others_that_do_not(sampling):
    """Those that sample draft with the target's noise, in shared tokens; a model that is the target is always right."""
    tokenizer = byte_level(300)
    model = tiny_llama(vocab_size=len(tokenizer), eos_token_id=None)
    source = TranslatedDraftCandidates(model, between(tokenizer, tokenizer))
    prompts = [ids_of(tokenizer, "the fox")[None], ids_of(tokenizer, "over the lazy dog")[None]]
    banned = {"suppress_tokens": [*tokenizer.all_special_ids, *range(100, 258)]}  # bytes that are no character
    with hf_smartspec.enabled(model), hf_smartspec.Engine(model, source, tokenizer=tokenizer) as engine:
        names = [
            engine.add_request(prompts[0][0].tolist(), max_new_tokens=16, **banned),
            engine.add_request(prompts[1][0].tolist(), max_new_tokens=16, **banned, **sampling),
        ]
        outputs = [engine.get_result(name, timeout=TIMEOUT) for name in names]
        for prompt, output, options in zip(prompts, outputs, ({}, sampling)):
            plain = model.generate(torch.from_numpy(prompt), max_new_tokens=16, assistant="none", **banned, **options)
            assert output.generated_tokens == plain[0, prompt.shape[1] :].tolist()
            assert output.statistics.accepted_tokens > 4


def test_what_is_drafted_does_not_depend_on_who_drafts_beside_it():
    """Greedy requests draft in all tokens of the draft, and others in those that both have, in one forward."""
    target, draft = byte_level(300), byte_level(500)
    model, translation = new_model("llama", vocab_size=len(draft)), between(target, draft)
    prompts = {"greedy": ids_of(target, TEXTS[0])[:9], "sampled": ids_of(target, TEXTS[1])[:7]}

    def drafts(names) -> dict:
        source = TranslatedDraftCandidates(model, translation, width=2)
        for name in names:
            source.begin(
                SourceRequest(
                    name, prompts[name], processors=LogitsProcessorList(), seed=5 if name == "sampled" else None
                )
            )
        return {name: tree.tokens.tolist() for name, tree in zip(names, source.propose(names, [12] * len(names)))}

    assert drafts(["greedy", "sampled"]) == drafts(["greedy"]) | drafts(["sampled"])


def test_drafts_are_not_encoded_anew_where_nobody_knows_where_tokens_lie(monkeypatch):
    target, draft = (make() for make in JOINING)
    model, translation = new_model("llama", vocab_size=len(draft)), between(target, draft)
    monkeypatch.setattr(Reencoding, "is_possible", lambda translation: False)
    source = TranslatedDraftCandidates(model, translation, width=3)
    source.start("a", ids_of(target, TEXTS[0])[:9])
    (tree,) = source.propose(["a"], [12])
    assert len(tree) == 12 and (translation._draft_ids[tree.tokens] >= 0).all()


def test_what_the_target_cannot_write_ends_a_branch():
    backend = Tokenizer(models.BPE({"<unk>": 0, "a": 1, "b": 2, "c": 3}, [], unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    target, draft = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>"), byte_level(300)
    translation = between(target, draft)
    text = text_of(translation, ids_of(target, "abc"))
    assert target.decode(written(translation, text, DraftTree.chain(draft("caxb").input_ids)).tokens) == "ca"


def test_padding_of_the_drafts_vocabulary_is_no_draft():
    target, draft = (make() for make in JOINING)
    padded = new_model("llama", vocab_size=len(draft) + 20)
    model = copy.deepcopy(padded)
    model.resize_token_embeddings(len(draft))
    with torch.no_grad():  # padding is the likeliest by far
        padded.get_output_embeddings().weight[len(draft) :] *= 1e3
    found = []
    for own in (model, padded):
        translation = Translation(target, draft, len(target), own.config.vocab_size)
        source = TranslatedDraftCandidates(own, translation, width=3)
        source.start("a", ids_of(target, TEXTS[0])[:9])
        found += source.propose(["a"], [12])
    assert len(found[0]) > 3 and found[1].tokens.tolist() == found[0].tokens.tolist()


class WordsInPython:
    """As a part of a tokenizer, it keeps that from being copied."""

    def pre_tokenize(self, text) -> None:
        pass


def test_a_tokenizer_that_cannot_be_copied_drafts_in_shared_tokens():
    target, draft = character_tokenizer("abcd", joined=["ab"]), character_tokenizer("dcbaxyz")
    model = new_model("llama", vocab_size=len(draft))
    target.backend_tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(WordsInPython())
    source = TranslatedDraftCandidates(model, between(target, draft), width=2)
    source.start("a", ids_of(target, "dcba"))
    (tree,) = source.propose(["a"], [8])
    assert len(tree) == 8 and set(target.convert_ids_to_tokens(tree.tokens)) <= {*"abcd", "<pad>"}
