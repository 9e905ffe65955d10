"""Rewards of completions of arithmetic problems, by rules: GSM8K's calculator notes, and the form of the answer."""

import operator
import re
from typing import Any

_NOTE = re.compile(r"<<(\d+)([-+*])(\d+)=(\d+)>>")
_ANSWER = re.compile(r"#### -?\d+\s*$")
_OPERATORS = {"-": operator.sub, "+": operator.add, "*": operator.mul}


def arithmetic(completions: list[Any], **_: Any) -> list[float]:
    """
    Return for each completion the share of its notes like <<3*4=12>> that are right, and a half more if it ends in ####
    and a number.
    """
    return [_reward(item if isinstance(item, str) else item[-1]["content"]) for item in completions]


def _reward(text: str) -> float:
    notes = _NOTE.findall(text)
    right = sum(_OPERATORS[sign](int(a), int(b)) == int(result) for a, sign, b, result in notes)
    return right / max(len(notes), 1) + 0.5 * bool(_ANSWER.search(text))
