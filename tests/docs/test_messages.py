"""The page of messages has all warnings that the library can give, and no other."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs/troubleshooting.md").read_text()
_SAYING = ("warning", "warning_once", "error", "warn_once")
_SKIPPED = ("commands", "training")  # their messages are for the user who called them


@cache
def _trees():
    paths = [path for folder in ("hf_smartspec", "candidates") for path in (REPOSITORY / folder).rglob("*.py")]
    return [ast.parse(path.read_text()) for path in paths if not set(path.parts) & set(_SKIPPED)]


def _parts(message):
    """The fixed parts of a message: what stands between the names and numbers that are filled in."""
    return [node.value for node in ast.walk(message) if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def _warnings():
    for tree in _trees():
        for call in ast.walk(tree):
            if not isinstance(call, ast.Call):
                continue
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            messages = [item for item in call.args if isinstance(item, ast.Constant | ast.JoinedStr) and _parts(item)]
            if name in _SAYING and messages:
                yield max(_parts(messages[0]), key=len).strip(" :")


def test_every_warning_is_on_the_page():
    found = sorted(set(_warnings()))
    assert len(found) > 20
    page = PAGE.replace("`", "")
    assert [text for text in found if text.replace("`", "") not in page] == []


@pytest.fixture(scope="module")
def said():
    return " ".join(part for tree in _trees() for part in _parts(tree)).replace("`", "")


def test_every_message_on_the_page_is_the_librarys(said):
    quoted = re.findall(r"^\| `([^`]+)` \|", PAGE, flags=re.MULTILINE)
    assert len(quoted) > 35
    for message in quoted:
        for part in message.split("..."):
            words = part.strip(" ,.:();")
            assert words in said, f"no message of the library has {words!r}"
