"""Suffix tree candidates: what they draft, whose text it comes from, what they keep, and files."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_smartspec import SuffixTreeCandidates
from hf_smartspec.candidates.request import SourceRequest

from ....covering import examples

SENTENCE = np.array([11, 12, 13, 14, 15, 16, 17, 18])


def small(**options):
    return SuffixTreeCandidates(**({"max_bytes": 2**20, "max_depth": 16, "max_match": 8} | options))


def ids(*tokens):
    return np.array(tokens, np.int64)


def run(source, request_id, prompt, output, limit=8, piece=1, namespace=""):
    """Decodes `output` as a target would that says just that; returns (drafted, accepted)."""
    source.begin(SourceRequest(request_id, np.asarray(prompt), namespace=namespace))
    at = drafted = accepted = 0
    while at < len(output):
        tree = source.propose([request_id], [limit])[0]
        tree.check_integrity(2**31)
        node, length = -1, 0
        while at + length < len(output) - 1 and (child := tree.child(node, int(output[at + length]))) is not None:
            node, length = child, length + 1
        drafted, accepted = drafted + len(tree), accepted + length
        source.observe(request_id, np.asarray(output[at : at + length + 1]))
        at += length + 1
    source.stop(request_id)
    return drafted, accepted


def paths(tree):
    """Every node's tokens from the root."""
    found = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist()):
        found.append([*(found[parent] if parent >= 0 else []), token])
    return found


def occurs(part, text):
    return any(list(text[i : i + len(part)]) == list(part) for i in range(len(text) - len(part) + 1))


def test_repeated_prompt_is_continued():
    source = small()
    source.start("a", ids(*SENTENCE, 1, 11, 12, 13))
    tree = source.propose(["a"], [4])[0]
    assert tree.best_chain().tokens.tolist() == [14, 15, 16, 17]


def test_earlier_outputs_are_continued_once_they_are_finished():
    source = small()
    source.start("a", ids(1))
    source.observe("a", SENTENCE)
    source.start("b", ids(9, 11, 12))
    assert len(source.propose(["b"], [4])[0]) == 0, "not finished yet"
    source.stop("a")
    assert source.propose(["b"], [3])[0].best_chain().tokens.tolist() == [13, 14, 15]


def test_prompts_are_not_kept_for_others():
    source = small()
    source.start("a", ids(*SENTENCE, *range(100, 120)))
    source.observe("a", ids(50, 51))
    source.stop("a")
    source.start("b", ids(11, 12, 13))
    assert len(source.propose(["b"], [4])[0]) == 0
    assert source.num_cached_tokens() == 2 + 8, "the output and the few tokens before it"


def test_first_token_is_drafted_from_how_outputs_begin():
    source = small()
    for k in range(3):
        run(source, k, [40 + k, 5, 6], [70, 71, 72, k])
    source.start("b", ids(99, 5, 6))
    assert source.propose(["b"], [3])[0].best_chain().tokens.tolist() == [70, 71, 72]


texts = st.lists(st.integers(0, 3), min_size=1, max_size=25)


@settings(deadline=None)
@given(st.lists(texts, max_size=4), texts, st.lists(texts, max_size=2), st.integers(0, 12), st.booleans(), st.data())
def test_drafts_are_probable_continuations_that_have_occurred(outputs, prompt, references, limit, chains, data):
    least = data.draw(st.sampled_from([0.0, 0.1, 0.4]))
    source = small(chains=chains, min_probability=least)
    source.add_outputs(outputs, progress=False)
    source.begin(SourceRequest("a", np.array(prompt), references=[np.array(text) for text in references]))
    text = list(prompt)
    for piece in data.draw(st.lists(texts, max_size=3)):
        source.observe("a", np.array(piece))
        text += piece
        tree = source.propose(["a"], [limit])[0]
        tree.check_integrity(4)
        assert len(tree) <= limit and (tree.is_chain or not chains)
        assert (tree.path_probs >= least - 1e-6).all() and (tree.probs < 1).all()
        siblings = list(zip(tree.parents.tolist(), tree.tokens.tolist()))
        assert len(set(siblings)) == len(siblings)
        for path in paths(tree):
            assert any(occurs([text[-1], *path], known) for known in [text, *outputs, *references]), path


def test_batch_drafts_equal_single_ones():
    rng = np.random.default_rng(0)
    outputs, prompts = rng.integers(0, 6, (20, 30)), rng.integers(0, 6, (11, 25))
    batch, single = small(), small()
    for source in (batch, single):
        source.add_outputs(list(outputs), progress=False)
        for name, prompt in enumerate(prompts):
            source.start(name, prompt)
    together = batch.propose(range(11), range(11))
    alone = [single.propose([name], [name])[0] for name in range(11)]
    for one, other in zip(together, alone):
        assert one.tokens.tolist() == other.tokens.tolist() and one.parents.tolist() == other.parents.tolist()
        assert one.probs.tolist() == other.probs.tolist()
    assert max(map(len, together)) > 5


def test_probabilities_are_learnt():
    """A follower that comes true one time in five is first overrated, then not."""
    source, rng = small(min_probability=0.0), np.random.default_rng(0)
    probs, hits = [], []
    for k in range(300):
        follower = int(rng.choice([60, 61, 62, 63, 64]))
        source.start(k, ids(1000 + k))
        source.observe(k, ids(50))
        tree = source.propose([k], [8])[0]
        if k >= 100:
            probs += tree.probs[tree.parents < 0].tolist()
            hits += (tree.tokens[tree.parents < 0] == follower).tolist()
        source.observe(k, ids(follower))
        source.stop(k)
    assert len(hits) > 800 and abs(np.mean(probs) - np.mean(hits)) < 0.05


@pytest.mark.parametrize("is_deep", [False, True])
def test_tokens_are_known_by_what_became_of_them_elsewhere(is_deep):
    """Of two followers that contexts know alike, one always comes true; so it does in contexts that are new."""
    source, right, wrong, probs = small(min_probability=0.0), 7, 8, []
    before = [90] if is_deep else []  # drafted as well, in front of the two
    for k in range(60):
        followers = [right, wrong] if k % 2 else [wrong, right]  # neither is always the newest
        text = [1000 + k, 2000 + k]
        source.add_outputs([[*text, *before, follower, 3000 + k] for follower in followers], progress=False)
        source.start(k, np.array(text))
        (tree,) = source.propose([k], [8])
        parent = tree.child(-1, 90) if is_deep else -1
        probs.append([float(tree.probs[tree.child(parent, token)]) for token in (right, wrong)])
        source.observe(k, np.array([*before, right]))
        source.stop(k)
    first, last = np.mean(probs[:2], axis=0), np.mean(probs[-10:], axis=0)
    assert first[0] < 1.5 * first[1] and last[0] > 3 * last[1]


def expand(outputs, pattern, size):
    """EXPANDSPECULATIONTREE by counting in the texts: D of the likeliest nodes, best first."""

    def count(string):
        return sum(text[i : i + len(string)] == string for text in outputs for i in range(len(text)))

    drafted, queue, nodes = [], [(1.0, pattern)], []
    while queue:
        path, string = queue.pop()
        nodes += [(path * count([*string, t]) / count(string), [*string, t]) for t in range(4) if count([*string, t])]
        nodes.sort(key=lambda node: -node[0])
        if len(drafted) < size and nodes:
            drafted.append(nodes.pop(0))
            queue.append(drafted[-1])
    return [path for path, _ in drafted]


@settings(deadline=None, max_examples=examples(60))
@given(st.lists(texts, min_size=1, max_size=4), st.lists(st.integers(0, 3), max_size=4, unique=True), st.data())
def test_algorithm_1_proposes_the_draft_of_the_highest_score(outputs, end, data):
    """SuffixDecoding, algorithm 1: GENERATECANDIDATETREE over p = 1 ... P; of equal scores, the first one stays."""
    factor, offset, limit = (data.draw(st.sampled_from(x)) for x in ([1.0, 2.5], [1.0, 0.0, -1.0], [3, 8, 40]))
    source = SuffixTreeCandidates.published(factor, 3, offset=offset, max_bytes=2**20)
    source.add_outputs(outputs, progress=False)
    prompt = [50, 51, *end]  # no token twice: nothing comes from the request's own tree
    source.start("a", np.array(prompt))
    tree = source.propose(["a"], [limit])[0]
    best, best_size = 0.0, 0
    for length in range(1, min(3, len(end)) + 1):
        pattern = prompt[-length:]
        if any(occurs(pattern, text) for text in outputs):
            draft = expand(outputs, pattern, min(limit, int(factor * length + offset)))
            if sum(draft) > best + 1e-9:
                best, best_size = sum(draft), len(draft)
    assert tree.path_probs.sum() == pytest.approx(best, abs=1e-4)
    assert len(tree) == best_size


@pytest.mark.parametrize(
    ("outputs", "prompt", "tokens", "probs"),
    [
        ([[1, 2, 3], [1, 2, 4], [1, 2, 4]], [9, 1, 2], [4, 3], [2 / 3, 1 / 3]),  # C(N) = COUNT(N) / COUNT(PARENT(N))
        ([[1, 2, 3, 6, 7, 8]], [1, 2, 4, 5, 1, 2], [3, 6, 7, 8], [1.0] * 4),  # equal scores: S_g comes before S_r
        ([[1, 2, 3], [1, 2, 6, 7]], [1, 2, 4, 5, 1, 2], [4, 5, 1, 2], [1.0] * 4),  # S_r has the higher SCORE
        ([[2, 3, 3, 3], [1, 2, 4, 4, 4]], [9, 1, 2], [4, 4, 4], [1.0] * 3),  # p = 2 has more than p = 1, four halves
        ([[5, 20 + k] for k in range(20)], [9, 5], [20, 21, 22, 23], [0.05] * 4),  # none is too unlikely
    ],
)  # fmt: skip
def test_the_published_draft_in_examples(outputs, prompt, tokens, probs):
    """SuffixDecoding, algorithm 1, with alpha = 4."""
    source = SuffixTreeCandidates.published(max_bytes=2**20)
    source.add_outputs(outputs, progress=False)
    source.start("a", np.array(prompt))
    tree = source.propose(["a"], [40])[0]
    assert sorted(tree.tokens.tolist()) == sorted(tokens)
    assert sorted(tree.probs.tolist()) == pytest.approx(sorted(probs))


@pytest.mark.parametrize("piece", [1, 7])
def test_drafts_of_hundreds_of_nodes_follow_a_repeated_text(piece):
    """Also those asked for beside small ones, before and after; all of what came true is learnt from at once."""
    options = {"max_bytes": 2**22, "max_depth": 300, "max_match": 64, "num_nodes": 256, "min_probability": 0.0}
    source, text = SuffixTreeCandidates(**options), np.random.default_rng(0).permutation(500)
    source.add_outputs([text, text, np.concatenate([text[:120], text[:100]])], progress=False)
    for name in ("a", "b"):
        source.start(name, text[:5])
        for start in range(5, 70, piece):
            source.observe(name, text[start : min(start + piece, 70)])
    small = source.propose(["b"], [8])[0]
    tree, again = source.propose(["a", "b"], [256, 8])
    assert small.tokens.tolist() == again.tokens.tolist() == text[70:78].tolist()
    chain = tree.best_chain().tokens.tolist()
    assert len(tree) > 200 and len(chain) >= 180 and chain == text[70 : 70 + len(chain)].tolist()
    before = source._slots.model.cells[:, :, 1].sum()
    source.observe("a", text[70:231])
    source.propose(["a"], [8])
    assert source._slots.model.cells[:, :, 1].sum() > before + 160, "of each token, several"
    source.observe("a", text[231:236])
    assert source.propose(["a"], [300])[0].tokens[:8].tolist() == text[236:244].tolist()


def test_a_published_draft_is_as_long_as_alpha_times_the_longest_match():
    """SuffixDecoding, algorithm 1: p up to P = 64, and MAX_SPEC = 256 nodes."""
    source, text = SuffixTreeCandidates.published(max_bytes=2**22), np.random.default_rng(0).permutation(500)
    source.add_outputs([text, text[::-1], text], progress=False)
    for length, size in ((1, 4), (10, 40), (64, 256), (90, 256)):
        source.start(length, np.concatenate([[999], text[100 - length : 100]]))
        tree = source.propose([length], [1000])[0]
        assert tree.is_chain and len(tree) == size
        if length > 1:
            assert tree.tokens.tolist() == text[100 : 100 + size].tolist() and tree.path_probs[-1] == 1
    assert source.default_num_nodes == source.most_nodes == 256 and not source.heeds_prices


def test_namespaces_neither_feed_nor_steer_one_another():
    source, alone = small(), small()
    for k in range(20):
        run(source, k, [1, 2], [*SENTENCE, k], namespace="other")
    for one in (source, alone):
        one.begin(SourceRequest("mine", ids(1, 2, 5, 5, 5, 11, 12), namespace="tenant"))
    assert source.propose(["mine"], [6])[0].tokens.tolist() == alone.propose(["mine"], [6])[0].tokens.tolist()
    for one in (source, alone):
        one.observe("mine", ids(5, 5))
    drafts = [one.propose(["mine"], [6])[0] for one in (source, alone)]
    assert drafts[0].tokens.tolist() == drafts[1].tokens.tolist()
    assert drafts[0].probs.tolist() == drafts[1].probs.tolist(), "what was learnt elsewhere has no influence"
    source.begin(SourceRequest("reader", ids(11, 12), namespace="tenant", reads=["other"]))
    assert source.propose(["reader"], [3])[0].best_chain().tokens.tolist() == [13, 14, 15]


def test_references_feed_their_request_only():
    source = small()
    source.begin(SourceRequest("a", ids(1, 12), references=[SENTENCE]))
    source.start("b", ids(1, 12))
    first, second = source.propose(["a", "b"], [3, 3])
    assert first.best_chain().tokens.tolist() == [13, 14, 15] and len(second) == 0
    source.stop("a")
    source.start("c", ids(1, 12))
    assert len(source.propose(["c"], [3])[0]) == 0


def test_saved_source_drafts_as_before(tmp_path):
    source, path = small(), tmp_path / "trees"
    for k in range(30):
        run(source, k, [1, 2], [*SENTENCE, k])
    source.save(path)
    loaded = SuffixTreeCandidates.load(path, progress=False, max_bytes=2**20, max_depth=16, max_match=8)
    assert loaded.num_cached_tokens() == source.num_cached_tokens()
    for one in (source, loaded):
        one.start("x", ids(1, 2, 11, 12))
    trees = [one.propose(["x"], [8])[0] for one in (source, loaded)]
    assert trees[0].tokens.tolist() == trees[1].tokens.tolist() and trees[0].probs.tolist() == trees[1].probs.tolist()


class Tokenizer:
    def __init__(self, *words):
        self.words = words

    def get_vocab(self):
        return {word: k for k, word in enumerate(self.words)}


def test_damaged_or_foreign_files_are_refused(tmp_path):
    source, path = small(), tmp_path / "trees"
    source.add_outputs([SENTENCE], progress=False)
    source.save(path, Tokenizer("a", "b"))
    whole = path.read_bytes()
    SuffixTreeCandidates.load(path, Tokenizer("a", "b"), progress=False)
    with pytest.raises(ValueError, match="another tokenizer"):
        SuffixTreeCandidates.load(path, Tokenizer("b", "a"), progress=False)
    for size in range(0, len(whole), max(len(whole) // 60, 1)):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"holds no suffix trees|is damaged"):
            SuffixTreeCandidates.load(path, progress=False)
    rng = np.random.default_rng(0)
    for position in rng.integers(0, len(whole), 60):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << int(rng.integers(8))
        path.write_bytes(flipped)
        with pytest.raises(ValueError, match=r"holds no suffix trees|is damaged"):
            SuffixTreeCandidates.load(path, progress=False)


def test_two_may_save_at_once(tmp_path):
    path, sources = tmp_path / "trees", [small(), small()]
    for k, source in enumerate(sources):
        source.add_outputs([np.full(200 + k, k)], progress=False)
    threads = [threading.Thread(target=lambda s=source: [s.save(path) for _ in range(20)]) for source in sources]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert SuffixTreeCandidates.load(path, progress=False).num_cached_tokens() in (200, 201)
    assert [entry.name for entry in tmp_path.iterdir()] == ["trees"], "no temporary file is left"


def test_threads_may_share_a_source():
    source, errors = small(), []
    rng = np.random.default_rng(0)
    outputs = rng.integers(0, 50, (8, 10, 40))

    def work(k):
        try:
            for turn, output in enumerate(outputs[k]):
                run(source, (k, turn), [1, 2, 3], output)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and source.num_cached_tokens() == 80 * (40 + 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_bytes": 2**36 + 1}, "`max_bytes` must be at most 68719476736"),
        ({"scoring": "best"}, "`scoring` must be 'learned' or 'counts'"),
        ({"factor": -1.0}, "`factor` and `offset` must be finite"),
        ({"max_bytes": 0}, "`max_bytes` must be an integer of at least 1"),
        ({"max_depth": 1}, "`max_depth` must be an integer of at least 2"),
        ({"max_match": 16}, "`max_match` must be at most 15"),
        ({"num_nodes": True}, "`num_nodes` must be an integer"),
        ({"num_nodes": 4097}, "`num_nodes` must be at most 4096"),
        ({"min_probability": 1.5}, r"`min_probability` must lie in \[0, 1\]"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        small(**options)


def test_bad_tokens_are_refused():
    source = small()
    with pytest.raises(TypeError, match="sequence of integers"):
        source.add_outputs([[0.5, 1.0]], progress=False)
    with pytest.raises(ValueError, match="must lie in"):
        source.add_outputs([[-1]], progress=False)
    with pytest.raises(ValueError, match="read 2 further"):
        source.begin(SourceRequest("b", ids(1), reads=["x", "y", "z"]))
    source.stop("never started")
