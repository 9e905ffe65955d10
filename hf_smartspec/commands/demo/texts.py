"""Tokens as text, and text as HTML."""

from collections.abc import Sequence
from html import escape

from transformers import PreTrainedTokenizerBase

TIMES = "\N{MULTIPLICATION SIGN}"
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


def pieces(tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the text that each token adds; a character of several tokens belongs to the last of them."""
    found: list[str] = []
    shown = ""
    for end in range(1, len(tokens) + 1):
        text = str(tokenizer.decode(list(tokens[:end])))
        if end < len(tokens) and text.endswith(_UNFINISHED):
            found.append("")
            continue
        found.append(text[len(shown) :])
        shown = text
    return found


def visible(text: str, most: int = 14) -> str:
    """Return a token's text for a small box: with visible blanks, cut where it is long."""
    text = text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣")
    return text if len(text) <= most else text[: most - 1] + "…"


def slug(label: str | None, known: Sequence[str]) -> str:
    """Return the class by which the style sheet colours a source; "target" for None."""
    if label is None:
        return "target"
    return f"source-{known.index(label) % 6}" if label in known else "source-0"


def notice(text: str, kind: str = "") -> str:
    """Return a message in place of a result."""
    return f'<div class="ss-notice {kind}" role="status">{escape(text)}</div>'


def card(value: str, caption: str, emphasis: bool = False) -> str:
    """Return a figure with its caption."""
    strong = " strong" if emphasis else ""
    return f'<div class="ss-card{strong}"><b>{escape(value)}</b><span>{escape(caption)}</span></div>'


def cards(*items: str) -> str:
    return f'<div class="ss-cards">{"".join(items)}</div>'
