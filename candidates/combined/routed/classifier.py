"""A classifier of texts, by language or subject, that learns from labelled texts one by one, without any model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ....validate import check_positive
from .features import Text, features_of
from .files import load_arrays, save_arrays

_SMOOTHING = 0.05  # added to every count
_FORMAT = 1


class TextClassifier:
    """
    Multinomial naive Bayes over hashed strings of one to five bytes (of text) or one to three tokens (of token ids),
    each counted once per text. It needs no download, learns from one text at a time, and a label that it has never met
    costs one line of counts. (scikit-learn's `partial_fit` needs all labels at its first call.)

    Args:
        num_features (`int`): Counts per label, float32; a power of two.
        min_texts (`int`): Texts of a label before it is predicted.
        min_probability (`float`): Least probability of a label that is predicted.
        half_life (`float`): Texts after which one counts half, so that counts follow the traffic.
    """

    def __init__(
        self,
        num_features: int = 2**16,
        min_texts: int = 4,
        min_probability: float = 0.6,
        half_life: float = 5000.0,
    ):
        for name, value in (("num_features", num_features), ("min_texts", min_texts)):
            check_positive(name, value)
        if num_features & (num_features - 1):
            raise ValueError(f"`num_features` must be a power of two, got {num_features!r}.")
        if not 0 <= min_probability <= 1:
            raise ValueError(f"`min_probability` must lie in [0, 1], got {min_probability!r}.")
        if not half_life > 0:
            raise ValueError(f"`half_life` must be positive, got {half_life!r}.")
        self.num_features, self.min_texts = int(num_features), int(min_texts)
        self.min_probability, self.half_life = float(min_probability), float(half_life)
        self._rows: dict[str, int] = {}
        self._counts = np.zeros((0, self.num_features), np.float32)  # per label
        self._num_texts = np.zeros(0)  # per label, decayed
        self._weight = 1.0  # of the next text: growing weights are decaying counts

    @property
    def labels(self) -> list[str]:
        """The labels that it has learnt."""
        return list(self._rows)

    def learn(self, texts: Sequence[Text], labels: Sequence[str]) -> None:
        """Learn from texts (strings, or token ids `[length]`: all of one kind) and their labels."""
        if len(texts) != len(labels):
            raise ValueError(f"Got {len(texts)} `texts` and {len(labels)} `labels`.")
        for text, label in zip(texts, labels):
            row = self._row(label)
            self._counts[row, features_of(text, self.num_features)] += self._weight
            self._num_texts[row] += self._weight
            self._weight *= 2 ** (1 / self.half_life)
            if self._weight > 1e6:
                self._counts /= self._weight
                self._num_texts /= self._weight
                self._weight = 1.0

    def _row(self, label: str) -> int:
        if not isinstance(label, str) or not label:
            raise TypeError(f"Labels must be strings, got {label!r}.")
        row = self._rows.get(label)
        if row is None:
            row = self._rows[label] = len(self._rows)
            self._counts = np.append(self._counts, np.zeros((1, self.num_features), np.float32), axis=0)
            self._num_texts = np.append(self._num_texts, 0.0)
        return row

    def predict(self, texts: Sequence[Text]) -> list[str | None]:
        """Return the likeliest label of each text; None where too few texts are known, or none is likely enough."""
        names, predicted = self.labels, list[str | None]()
        for text in texts:
            probs = self.probabilities(text)
            best = int(probs.argmax()) if len(probs) else 0
            predicted.append(names[best] if len(probs) and probs[best] >= max(self.min_probability, 1e-9) else None)
        return predicted

    def probabilities(self, text: Text) -> np.ndarray:
        """
        Return the probabilities of `labels`, float64; 0 for those of which too few texts are known, and for all if none
        is known well enough. As strings overlap, their evidence counts as that of the square root of their number.
        """
        features = features_of(text, self.num_features)
        known = self._num_texts / self._weight > self.min_texts - 0.5
        result = np.zeros(len(self._rows))
        if not known.any() or not len(features):
            return result
        counts = self._counts[known]
        scores = np.log(counts[:, features] / self._weight + _SMOOTHING).sum(axis=1, dtype=np.float64)
        totals = counts.sum(axis=1, dtype=np.float64) / self._weight
        scores -= len(features) * np.log(totals + _SMOOTHING * self.num_features)
        scores = scores / np.sqrt(len(features)) + np.log(self._num_texts[known])
        probs = np.exp(scores - scores.max())
        result[known] = probs / probs.sum()
        return result

    # On disk

    def save(self, path: str | Path) -> None:
        """Write a file (`.npz`), whole or not at all."""
        save_arrays(
            path,
            options=np.array([_FORMAT, self.min_texts, self.min_probability, self.half_life]),
            labels=np.array(self.labels, np.str_),
            counts=self._counts / self._weight,
            num_texts=self._num_texts / self._weight,
        )

    @classmethod
    def load(cls, path: str | Path) -> "TextClassifier":
        """
        Read a file that `save` has written.

        Raises:
            ValueError: if it is no such file.
        """
        return load_arrays(path, "TextClassifier", cls._of)

    @classmethod
    def _of(cls, file: Mapping[str, Any]) -> "TextClassifier":
        version, min_texts, min_probability, half_life = file["options"].tolist()
        labels, counts, num_texts = file["labels"].tolist(), file["counts"], file["num_texts"]
        if version != _FORMAT or counts.shape[0] != len(labels) or num_texts.shape != (len(labels),):
            raise ValueError("sizes or version differ")
        classifier = cls(counts.shape[1], int(min_texts), min_probability, half_life)
        classifier._rows = {label: row for row, label in enumerate(labels)}
        classifier._counts, classifier._num_texts = counts.astype(np.float32), num_texts.astype(np.float64)
        return classifier
