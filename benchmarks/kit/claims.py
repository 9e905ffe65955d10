"""Claims about figures; a command whose claims fail exits with 1."""

from collections.abc import Iterable
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape


class Claim(NamedTuple):
    """A sentence that holds in the figures, or does not."""

    text: str
    holds: bool
    detail: str = ""


def print_claims(claims: Iterable[Claim], console: Console) -> None:
    """Print each claim on a line."""
    for claim in claims:
        mark = "[green]yes[/green]" if claim.holds else "[red]NO [/red]"
        console.print(f"{mark} {escape(': '.join(filter(None, (claim.text, claim.detail))))}", highlight=False)


def exit_status(claims: Iterable[Claim]) -> int:
    """Return 0 if all claims hold, else 1."""
    return 0 if all(claim.holds for claim in claims) else 1
