"""The terminal of a chat. Where output is piped, answers only."""

import contextlib
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from ..common.answering.text import Piece, printable

PROMPT, CONTINUED = "> ", "… "
ACCEPTED = Style(color="green")
_NOTE = Style(dim=True)


class Screen:
    """Input and output of a chat; where both are a terminal, it is interactive: with a prompt, colours and notes."""

    def __init__(self) -> None:
        self.is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._console = Console(highlight=False, soft_wrap=True)

    def read(self) -> str:
        """
        Return the user's next turn; a backslash at the end of a line continues it in the next line. Raises `EOFError`
        at the end of the input.
        """
        lines = [self._line(PROMPT)]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            try:
                lines.append(self._line(CONTINUED))
            except EOFError:
                break
        return "\n".join(lines)

    def _line(self, prompt: str) -> str:
        if self.is_interactive:
            return input(prompt)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")

    def complete(self, words: Sequence[str]) -> None:
        """Let the arrow keys recall earlier lines, and the tab key complete these words."""
        if not self.is_interactive:
            return
        with contextlib.suppress(ImportError):  # Windows has none
            import readline

            def completed(text: str, state: int) -> str | None:
                found = [word for word in words if word.startswith(text)] if text.startswith("/") else []
                return found[state] if state < len(found) else None

            readline.set_completer(completed)
            readline.set_completer_delims(" \t\n")
            readline.parse_and_bind("tab: complete")

    def write(self, pieces: Sequence[Piece]) -> None:
        """Print further pieces of an answer."""
        if self.is_interactive:
            text = Text.assemble(*((printable(piece.text), ACCEPTED if piece.source else "") for piece in pieces))
            self._console.print(text, end="")
        else:
            sys.stdout.write("".join(piece.text for piece in pieces))
        sys.stdout.flush()

    def end_answer(self, text: str) -> None:
        """End the line of an answer, unless its `text` has done so."""
        if not text.endswith("\n"):
            sys.stdout.write("\n")
        sys.stdout.flush()

    def note(self, text: str | Text) -> None:
        """Print a remark, on a terminal only."""
        if self.is_interactive:
            self._console.print(text, style=_NOTE)

    def report(self, text: str) -> None:
        """Print the result of a command or an error, on stderr where answers are piped."""
        if self.is_interactive:
            self._console.print(text, markup=False)
        else:
            print(text, file=sys.stderr)

    def show(self, table: Table) -> None:
        (self._console if self.is_interactive else Console(stderr=True)).print(table)
