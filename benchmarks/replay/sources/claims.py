"""Claims of the papers about their sources, checked against the figures of `python -m benchmarks sources`."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from hf_smartspec.commands.replay.curves import Point, geometric_mean, ratios_at_equal_drafts

from ...kit.claims import Claim

Numbers: TypeAlias = dict[str, Any]  # as `Tally.summary` gives them
Settings: TypeAlias = dict[str, Numbers]  # by setting
Series: TypeAlias = dict[str, Settings]
Figures: TypeAlias = dict[str, Series]  # by data set

_AS_GOOD = 0.97
_STABLE = 1.25
_AS_FAST = 1.5
_AS_SAMPLED = 0.95
_ADDS_UP = 0.9
_SURE = 0.5  # confidence
_PARTS = ("suffix", "draft")  # of the hybrid


def ratio_claim(text: str, ratios: Mapping[str, float], least: float = 1.0, most: float = np.inf) -> Claim:
    """
    Return a claim that holds if the ratio of most data sets lies above `least` and not above `most`, and so does the
    geometric mean of all.
    """
    values = [ratio for ratio in ratios.values() if np.isfinite(ratio) and ratio > 0]
    mean, count = geometric_mean(values), sum(least < value <= most for value in values)
    holds = least < mean <= most and count > len(values) / 2
    return Claim(text, bool(holds), f"{mean - 1:+.0%} ({_of(count, len(values))})")


def count_claim(text: str, holds: Mapping[str, bool]) -> Claim:
    """Return a claim that holds if it does in most data sets."""
    return Claim(text, sum(holds.values()) > len(holds) / 2, _of(sum(holds.values()), len(holds)))


def _of(count: int, total: int) -> str:
    return f"in {count} of {total} data set{'s' if total > 1 else ''}"


def _by_data_set(figures: Figures, function: Callable[[Series], Any]) -> dict[str, Any]:
    return {name: function(series) for name, series in figures.items()}


def _speed(numbers: Numbers) -> float:
    return numbers["tokens_per_step"] or 0.0


def tree_claims(figures: Figures) -> list[Claim]:
    def gain(series: Series) -> float:
        trees = series["trees"]
        return _speed(trees["both"]) / max(_speed(trees["global"]), _speed(trees["per request"]))

    def is_global_better(series: Series) -> bool:
        return _speed(series["trees"]["global"]) > _speed(series["trees"]["per request"])

    return [
        ratio_claim("SuffixDecoding, figure 7: both trees yield more per step than the better one alone",
                    _by_data_set(figures, gain)),
        count_claim("SuffixDecoding, figure 7: the global tree contributes more than the request's in most tasks",
                    _by_data_set(figures, is_global_better)),
    ]  # fmt: skip


def _curve(settings: Settings) -> list[Point]:
    return [Point(item["drafted_per_step"] or 0.0, item["accepted_per_step"] or 0.0) for item in settings.values()]


def _at_equal_drafts(series: Series, name: str, other: str) -> float:
    return geometric_mean(ratios_at_equal_drafts(_curve(series[name]), _curve(series[other])))


def length_claims(figures: Figures) -> list[Claim]:
    def trades(series: Series) -> bool:
        alphas = list(series["alpha"].values())
        accepted = [item["accepted_per_step"] for item in alphas]
        rates = [item["acceptance_rate"] or 0.0 for item in alphas]
        return accepted == sorted(accepted) and rates == sorted(rates, reverse=True)

    return [
        count_claim("SuffixDecoding, section on alpha: a larger alpha accepts more tokens, at a lower rate",
                    _by_data_set(figures, trades)),
        ratio_claim("SuffixDecoding, figure 2b: alpha p nodes accept more than a fixed number, at equal drafts",
                    _by_data_set(figures, lambda series: _at_equal_drafts(series, "alpha", "fixed"))),
        ratio_claim("Learnt probabilities accept more than the published score (alpha p), at equal drafts",
                    _by_data_set(figures, lambda series: _at_equal_drafts(series, "learned", "alpha"))),
    ]  # fmt: skip


def size_claims(figures: Figures) -> list[Claim]:
    def speeds(series: Series) -> list[float]:
        return [_speed(numbers) for numbers in series["size"].values()]

    def spread(series: Series) -> float:
        rates = [numbers["acceptance_rate"] for size, numbers in series["size"].items() if size != "0"]
        rates = [rate for rate in rates if rate]
        return max(rates) / min(rates) if rates else np.nan

    def cost(series: Series) -> float:
        costs = [numbers["us_per_node"] for size, numbers in series["size"].items() if size != "0"]
        return costs[-1] / costs[0] if costs else np.nan

    return [
        ratio_claim("SuffixDecoding, figure 8: the largest tree yields more per step than none",
                    _by_data_set(figures, lambda series: speeds(series)[-1] / speeds(series)[0])),
        count_claim("SuffixDecoding, figure 8: every larger tree yields more per step",
                    _by_data_set(figures, lambda series: bool(np.all(np.diff(speeds(series)) > 0)))),
        ratio_claim(f"SuffixDecoding, figure 8: the acceptance rate is stable (highest / lowest up to {_STABLE})",
                    _by_data_set(figures, spread), least=0.0, most=_STABLE),
        ratio_claim(f"SuffixDecoding, table 2: look-ups remain fast (a draft token takes up to {_AS_FAST} times as "
                    "long in the largest tree as in the smallest)",
                    _by_data_set(figures, cost), least=0.0, most=_AS_FAST),
    ]  # fmt: skip


def shift_claims(figures: Figures) -> list[Claim]:
    def ratio(name: str, other: str) -> Callable[[Series], float]:
        return lambda series: _speed(series["second half"][name]) / _speed(series["second half"][other])

    return [
        ratio_claim("SuffixDecoding, figure 9: outputs kept since the shift help, compared with keeping none",
                    _by_data_set(figures, ratio("kept", "frozen"))),
        ratio_claim(f"SuffixDecoding, figure 9: adapted, it is as good as one that knows only the new (at least "
                    f"{_AS_GOOD} of it)", _by_data_set(figures, ratio("kept", "fresh")), least=_AS_GOOD),
    ]  # fmt: skip


def datastore_claims(figures: Figures) -> list[Claim]:
    def gain(series: Series) -> float:
        sources = series["sources"]
        return _speed(sources["both"]) / max(_speed(sources["own text"]), _speed(sources["datastore"]))

    def share(series: Series) -> float:
        own, store, both = (series["sources"][name]["accepted_per_step"] for name in ("own text", "datastore", "both"))
        return both / (own + store) if own + store else np.nan

    def against_others(series: Series) -> float:
        published, *others = (series["sources"][name]["accepted_per_step"] for name in ("SSSD", "REST", "PIA"))
        return published / max(others) if max(others) else np.nan

    return [
        ratio_claim("SSSD, section 4.1: both sources yield more per step than the better one alone",
                    _by_data_set(figures, gain)),
        ratio_claim(f"SSSD, figure 4a: accepted tokens of the two almost add up (at least {_ADDS_UP} of the sum)",
                    _by_data_set(figures, share), least=_ADDS_UP),
        ratio_claim("SSSD, figures 4b and c: as published, it accepts more than REST and PIA do",
                    _by_data_set(figures, against_others)),
    ]  # fmt: skip


def hybrid_claims(figures: Figures) -> list[Claim]:
    def best(series: Series, key: str) -> str:
        return max(series["tau"], key=lambda setting: series["tau"][setting][key])

    def is_mixed(series: Series) -> bool:
        return best(series, "speed_up") not in _PARTS

    def gain(series: Series) -> float:
        tau = series["tau"]
        hybrids = [_speed(numbers) for name, numbers in tau.items() if name not in _PARTS]
        return max(hybrids) / max(_speed(tau[name]) for name in _PARTS)

    def learnt(series: Series) -> float:
        tau = series["tau"]
        return tau["learned"]["speed_up"] / tau[best(series, "speed_up")]["speed_up"]

    return [
        ratio_claim("SuffixDecoding, figure 4: the hybrid at its best tau yields more per step than either part",
                    _by_data_set(figures, gain)),
        count_claim("SuffixDecoding, section 4.2: there it is also faster than either part",
                    _by_data_set(figures, is_mixed)),
        ratio_claim(f"SuffixDecoding, appendix B.1: tau at the drafter's mean accepted length is as fast as the best "
                    f"(at least {_AS_GOOD} of it)", _by_data_set(figures, learnt), least=_AS_GOOD),
    ]  # fmt: skip


def temperature_claims(figures: Figures) -> list[Claim]:
    def kept(series: Series) -> float:
        return _speed(series["SSSD"]["1"]) / _speed(series["SSSD"]["0"])

    def is_least(series: Series) -> bool:
        accepted = {setting: numbers["accepted_per_step"] for setting, numbers in series["SSSD"].items()}
        return min(accepted, key=accepted.__getitem__) == "2"

    return [
        ratio_claim(f"SSSD, section 4.2: at temperature 1, drafts yield as much as at 0 (at least {_AS_SAMPLED} of it)",
                    _by_data_set(figures, kept), least=_AS_SAMPLED),
        count_claim("SSSD, section 4.2: least is accepted at temperature 2", _by_data_set(figures, is_least)),
    ]  # fmt: skip


def confidence_claims(figures: Figures) -> list[Claim]:
    def accepted(series: Series, is_sure: bool) -> float:
        right, wrong = (
            sum(numbers["count"] for first, numbers in series[name].items() if (float(first) >= _SURE) == is_sure)
            for name in ("accepted", "rejected")
        )
        return right / (right + wrong) if right + wrong else np.nan

    return [
        ratio_claim(
            f"SmartSpec, figure 17: tokens with a confidence of {_SURE} or more are accepted more often than others",
            _by_data_set(figures, lambda series: accepted(series, True) / accepted(series, False)),
        )
    ]  # fmt: skip
