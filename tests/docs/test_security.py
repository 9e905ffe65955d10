"""The page on security names tests that hold its promises: they are there."""

import ast
import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def test_every_promise_has_its_test():
    text = (REPOSITORY / "docs/security.md").read_text()
    rows = text.split("| promise | test |\n")[1].split("\n\n")[0].splitlines()[1:]
    assert len(rows) > 20
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", row)
        assert named, row
        for path, name in named:
            tree = ast.parse((REPOSITORY / path).read_text())
            tests = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
            assert name in tests or not name, f"{path} has no {name}"
