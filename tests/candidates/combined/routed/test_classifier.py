"""The classifier learns languages and tasks from a few labelled texts, one by one, as text or as token ids."""

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from hf_smartspec import TextClassifier

from .articles import ARTICLES

MODELS = Path(__file__).parents[4] / "demos/models"


def languages():
    """Pieces of seven words, in turn: the first 24 to learn from, the others to ask about."""
    pieces = []
    for language, text in ARTICLES.items():
        words = text.split()
        pieces.append([(" ".join(words[at : at + 7]), language) for at in range(0, len(words) - 6, 7)])
    texts = [item for group in zip(*pieces) for item in group]
    return texts[:24], texts[24:]


def tasks():
    """The prompts of the demos; every second one to ask about."""
    lines = (Path(__file__).parents[4] / "demos/prompts.jsonl").read_text().splitlines()
    rows = sorted(map(json.loads, lines), key=lambda row: row["category"])
    texts = [(row["prompt"], row["category"]) for row in rows]
    return texts[::2], texts[1::2]


def accuracy(classifier, known, asked):
    for text, label in known:
        classifier.learn([text], [label])
    return float(
        np.mean([found == label for found, (_, label) in zip(classifier.predict([t for t, _ in asked]), asked)])
    )


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODELS / "target")


def tokenized(tokenizer, texts):
    return [(np.array(tokenizer(text).input_ids), label) for text, label in texts]


def test_languages_of_texts_that_it_has_not_seen():
    known, asked = languages()
    assert len(asked) >= 12 and accuracy(TextClassifier(min_texts=2), known, asked) >= 0.8


def test_tasks_of_prompts_that_it_has_not_seen():
    known, asked = tasks()
    assert len(asked) >= 10 and accuracy(TextClassifier(min_texts=1, min_probability=0), known, asked) >= 0.75


def test_token_ids_will_do(tokenizer):
    known, asked = (tokenized(tokenizer, texts) for texts in languages())
    assert accuracy(TextClassifier(min_texts=2, min_probability=0), known, asked) >= 0.75


def test_nothing_is_said_before_enough_is_known():
    classifier = TextClassifier(min_texts=3)
    assert classifier.predict(["The cat"]) == [None] and classifier.labels == []
    for _ in range(2):
        classifier.learn(["The cat sat on the mat.", "Die Katze saß auf der Matte."], ["en", "de"])
        assert classifier.predict(["The cat"]) == [None]
    classifier.learn(["The dog sat on the mat."], ["en"])
    assert classifier.predict(["The cat", ""]) == ["en", None], "no text, no label"
    assert classifier.probabilities("The cat").tolist() == [1.0, 0.0]
    classifier.learn(["Der Hund saß auf der Matte."], ["de"])
    assert classifier.predict(["The cat sat", "Die Katze saß"]) == ["en", "de"]
    assert classifier.probabilities("Die Katze saß").sum() == pytest.approx(1.0)
    assert TextClassifier(min_texts=1, min_probability=1.0).predict(["x"]) == [None]


def test_doubt_is_silence():
    classifier = TextClassifier(min_texts=1)
    classifier.learn(["abc abc", "xyz xyz"], ["a", "x"])
    assert classifier.predict(["abc", "xyz", "abc xyz"]) == ["a", "x", None]


def test_what_is_seen_lately_counts_more():
    """A label that means something else from some time on."""
    classifier, plain = TextClassifier(min_texts=1, half_life=20), TextClassifier(min_texts=1, half_life=1e9)
    for found in (classifier, plain):
        found.learn(["hello world"] * 100 + ["guten tag"] * 100, ["x"] * 100 + ["y"] * 100)
        found.learn(["guten tag"] * 90, ["x"] * 90)
    assert classifier.predict(["guten tag"]) == ["x"] and plain.predict(["guten tag"]) == ["y"]


def test_weights_are_renewed_before_they_overflow():
    classifier = TextClassifier(num_features=2**8, min_texts=1, half_life=5.0)
    for _ in range(2000):
        classifier.learn(["abc", "xyz"], ["a", "x"])
    assert np.isfinite(classifier._counts).all() and classifier.predict(["abc", "xyz"]) == ["a", "x"]


def test_what_is_saved_comes_back(tmp_path):
    known, asked = languages()
    classifier = TextClassifier(2**12, 2, 0.5, 300.0)
    assert accuracy(classifier, known, asked) > 0.7
    path = tmp_path / "languages"
    classifier.save(path)
    classifier.save(path)
    assert [item.name for item in tmp_path.iterdir()] == ["languages"], "nothing else is left"
    loaded = TextClassifier.load(path)
    for text, label in asked:
        assert np.allclose(loaded.probabilities(text), classifier.probabilities(text), rtol=1e-3)
        for found in (loaded, classifier):
            found.learn([text], [label])
    assert loaded.labels == classifier.labels and loaded.min_texts == 2 and loaded.half_life == 300.0
    assert loaded.num_features == 2**12


def test_a_file_that_was_not_written_to_the_end_leaves_the_old_one(tmp_path, monkeypatch):
    classifier = TextClassifier(2**8, 1)
    classifier.learn(["abc"], ["a"])
    classifier.save(tmp_path / "file")
    classifier.learn(["xyz"], ["x"])
    monkeypatch.setattr(np, "savez_compressed", lambda file, **arrays: file.write(b"half") and 1 / 0)
    with pytest.raises(ZeroDivisionError):
        classifier.save(tmp_path / "file")
    assert TextClassifier.load(tmp_path / "file").labels == ["a"]
    assert [item.name for item in tmp_path.iterdir()] == ["file"]


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match="holds no TextClassifier"):
        TextClassifier.load(path)
    np.savez(path, labels=np.array(["a"]))
    with pytest.raises(ValueError, match="holds no TextClassifier"):
        TextClassifier.load(f"{path}.npz")
    with pytest.raises(FileNotFoundError):
        TextClassifier.load(tmp_path / "none")


@pytest.mark.parametrize(
    "options", [{"num_features": 1000}, {"num_features": 0}, {"min_texts": 0}, {"min_probability": 2}, {"half_life": 0}]
)
def test_bad_options_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        TextClassifier(**options)


def test_bad_labels_are_refused():
    with pytest.raises(TypeError, match="Labels"):
        TextClassifier().learn(["a"], [3])
    with pytest.raises(ValueError, match="1 `texts` and 2 `labels`"):
        TextClassifier().learn(["a"], ["x", "y"])
