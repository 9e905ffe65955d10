"""The commands that the README shows: they are accepted as printed, and name files that exist."""

import re
import shlex
from pathlib import Path

import pytest

from hf_smartspec.commands import main as cli

REPOSITORY = Path(__file__).parents[2]
LINES = re.findall(r"^smartspec [^\n]+$", (REPOSITORY / "README.md").read_text(), flags=re.MULTILINE)


def test_the_readme_shows_commands():
    assert len(LINES) >= 10


@pytest.mark.parametrize("line", LINES)
def test_a_command_of_the_readme_is_accepted_as_printed(line):
    _, *words = shlex.split(line, comments=True)
    path = cli._command_path(words)
    assert path is not None, f"{line!r} names no command"
    arguments = words[len(path) :]
    _, parser = cli.load_command(path)
    parser.parse_args(arguments)
    outputs = [arguments[at + 1] for at, word in enumerate(arguments) if word in ("--output", "--json", "--plot")]
    for word in arguments:
        if ("/" in word or "." in word) and word not in outputs:
            assert (REPOSITORY / word).exists(), f"{word!r} is not in the repository"
