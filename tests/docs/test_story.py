"""The page that tells one step beside the code: its lines and names are those of the code."""

import inspect
import re
from pathlib import Path

from hf_smartspec.decoding.loop import DecodingLoop

REPOSITORY = Path(__file__).parents[2]
STORY = (REPOSITORY / "docs/story.md").read_text()


def test_its_code_is_that_of_the_step():
    (block,) = re.findall(r"^```py\n(.*?)^```", STORY, re.MULTILINE | re.DOTALL)
    shown = [line.partition("#")[0].strip() for line in block.splitlines()]
    lines = [line.partition("#")[0].strip() for line in inspect.getsource(DecodingLoop.step).splitlines()]
    assert [line for line in lines if line in shown] == shown


def test_its_functions_exist():
    rows = re.findall(r"^\| `([\w/.]+\.py)` \| ([^|]+) \|", STORY, re.MULTILINE)
    assert len(rows) >= 6
    for path, functions in rows:
        defined = re.findall(r"^ *def (\w+)\(", (REPOSITORY / path).read_text(), re.MULTILINE)
        assert set(re.findall(r"`(\w+)`", functions)) <= set(defined), path
