"""
Count what somebody who works on the package has to hold in mind, in a table with a column for each checkout, such as
the ones before and after a change: `python docs/tools/house.py [FOLDER ...]`.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

# First words of docstrings that neither define a thing nor say what is done.
FRAGMENTS = set("What Whether Of Who Whose Whom Those Where When As If For By Behind Without With In On That".split())
BEHIND = re.compile(r"\bbehind\b", re.IGNORECASE)
Graph = dict[str, set[str]]


def modules(checkout: Path) -> dict[str, Path]:
    """The package's modules by name; `candidates` lies beside it and belongs to it."""
    found = {}
    for folder in ("hf_smartspec", "candidates"):
        for path in sorted((checkout / folder).rglob("*.py")):
            parts = path.relative_to(checkout).with_suffix("").parts
            if path.is_relative_to(checkout / "hf_smartspec" / "candidates"):
                continue  # a link to the other folder
            name = ".".join(parts if folder == "hf_smartspec" else ("hf_smartspec", *parts))
            found[name.removesuffix(".__init__")] = path
    return found


def imports(files: dict[str, Path], trees: dict[str, ast.Module]) -> Graph:
    """The modules that each imports, for types alone or within functions too."""
    graph: Graph = {}
    for name, tree in trees.items():
        package = name if files[name].name == "__init__.py" else name.rpartition(".")[0]
        targets: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                targets.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                parts = package.split(".")
                base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
                origin = ".".join(filter(None, [base, node.module]))
                inner = {f"{origin}.{alias.name}" for alias in node.names}
                targets |= inner & files.keys() or {origin}
        graph[name] = (targets & files.keys()) - {name}
    return graph


def circles(graph: Graph) -> list[set[str]]:
    """Groups of modules that import one another, directly or by way of others."""

    def reached(start: str) -> set[str]:
        seen, stack = set(), [start]
        while stack:
            for other in graph[stack.pop()] - seen:
                seen.add(other)
                stack.append(other)
        return seen

    reach = {name: reached(name) for name in graph}
    groups = {frozenset(other for other in reach[name] if name in reach[other]) for name in graph}
    return [set(group) for group in groups if len(group) > 1]


def docstrings(trees: dict[str, ast.Module]) -> Iterator[str]:
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                yield text


def methods(tree: ast.Module, name: str) -> int:
    """Public methods of a class."""
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    return sum(isinstance(node, ast.FunctionDef) and not node.name.startswith("_") for node in found.body)


def counts(checkout: Path) -> dict[str, str]:
    files = modules(checkout)
    texts = {name: path.read_text() for name, path in files.items()}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    graph = imports(files, trees)
    lines = {name: len(text.splitlines()) for name, text in texts.items()}
    rooms: Counter[str] = Counter()
    for name, number in lines.items():
        rooms[[*name.split("."), "(top)"][1]] += number
    importers = Counter(other for name in graph for other in graph[name])
    public = [
        node.name
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    ]
    classes = Counter(node.name for tree in trees.values() for node in tree.body if isinstance(node, ast.ClassDef))
    said = list(docstrings(trees))
    fragments = sum(text.split()[0].strip(",.:;") in FRAGMENTS for text in said)
    tests = [path for path in (checkout / "tests").rglob("*.py")]
    benches = [len(path.read_text().splitlines()) for path in (checkout / "benchmarks").rglob("*.py")]
    total = sum(lines.values())
    return {
        "files": f"{len(files)}",
        "lines": f"{total:,}",
        "lines without commands": f"{total - rooms['commands']:,}",
        "lines of benchmarks, not installed": f"{sum(benches):,}",
        "bench files over 250 lines": f"{sum(number > 250 for number in benches)}",
        "lines of tests": f"{sum(len(path.read_text().splitlines()) for path in tests):,}",
        "public functions and classes": f"{len(public):,}",
        "class names in several modules": f"{sum(number > 1 for number in classes.values())}",
        "modules that one module imports": f"{sum(importers[name] == 1 for name in files)}",
        "import circles": f"{len(circles(graph))}",
        "methods of a source": f"{methods(trees['hf_smartspec.candidates.base'], 'TreeCandidateGenerator')}",
        "docstrings": f"{len(said):,}",
        "docstrings that begin with a fragment": f"{fragments / len(said):.1%}",
        "'behind'": f"{sum(len(BEHIND.findall(text)) for text in texts.values())}",
    } | {f"lines of {room}": f"{number:,}" for room, number in sorted(rooms.items())}


def main() -> None:
    checkouts = [Path(argument) for argument in sys.argv[1:]] or [Path(__file__).parents[2]]
    columns = [counts(checkout) for checkout in checkouts]
    names = list(dict.fromkeys(name for column in columns for name in column))
    print("| | " + " | ".join(str(checkout) for checkout in checkouts) + " |")
    print("| --- |" + " ---: |" * len(columns))
    for name in names:
        print(f"| {name} | " + " | ".join(column.get(name, "") for column in columns) + " |")


if __name__ == "__main__":
    main()
