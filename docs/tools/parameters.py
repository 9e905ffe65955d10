"""
What pages show of the code: tables of constructors' parameters, from signatures and docstrings, and whole files.

    <!-- parameters: hf_smartspec.SuffixTreeCandidates -->
    ... the table ...
    <!-- end -->

    <!-- file: demos/examples/ngram_source.py -->
    ... the file ...
    <!-- end -->

`python docs/tools/parameters.py` writes them anew; a test says so where one is out of date.
"""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1]
_FILE = re.compile(r"(<!-- file: ([\w./]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_TABLE = re.compile(r"(<!-- parameters: ([\w.]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_ENTRY = re.compile(r"^([\w*]+(?:, [\w*]+)*)(?: \((.*?)\))?: (.*)$", re.DOTALL)
_SEE = re.compile(r"^See `(\w+)`\.$")


def main() -> None:
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text()
        if (new := renewed(text)) != text:
            page.write_text(new)
            print(page.relative_to(DOCS.parent))


def renewed(text: str) -> str:
    """A page with its tables and files as they should be."""
    text = _FILE.sub(lambda match: f"{match[1]}\n```python\n{_file(match[2])}```\n\n{match[3]}", text)
    return _TABLE.sub(lambda match: f"{match[1]}\n{table(named(match[2]))}\n\n{match[3]}", text)


def _file(name: str) -> str:
    return (DOCS.parent / name).read_text()


def named(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def table(item: Any) -> str:
    """
    The parameters of a class or function.

    Raises:
        LookupError: for a parameter without a word in the docstring.
    """
    rows = ["| parameter | default | meaning |", "| --- | --- | --- |"]
    described = descriptions(item)
    for parameter in inspect.signature(item).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.name not in described:
            raise LookupError(f"{item.__qualname__} says nothing of its parameter {parameter.name!r}")
        rows.append(f"| `{parameter.name}` | {_default(parameter)} | {described[parameter.name]} |")
    return "\n".join(rows)


def _default(parameter: inspect.Parameter) -> str:
    if parameter.default is parameter.empty:
        return "required"
    value = parameter.default
    if callable(value):
        return f"`{value.__module__}.{value.__qualname__}`"
    if isinstance(value, int) and value > 2**16 and not value & (value - 1):
        return f"`2**{value.bit_length() - 1}`"
    return f"`{value!r}`"


def descriptions(item: Any) -> dict[str, str]:
    """What docstrings say of each parameter, in a cell of a table."""
    found: dict[str, str] = {}
    for entry in _entries(inspect.getdoc(item) or ""):
        match = _ENTRY.match(entry)
        if match is None:
            raise LookupError(f"{item.__qualname__}: {entry!r} describes no parameter")
        names, meaning = match[1].split(", "), match[3]
        if see := _SEE.match(meaning):
            others = descriptions(_called(item, see[1]))
            found |= {name: others[name] for name in names}
        else:
            found |= dict.fromkeys(names, meaning.replace("|", "\\|"))
    return found


def _entries(doc: str) -> list[str]:
    section = re.search(r"^Args:\n((?: .*\n?|\n)*)", doc, re.MULTILINE)
    text = inspect.cleandoc("\n" + section[1]) if section else ""
    return [" ".join(entry.split()) for entry in re.split(r"\n(?! )", text) if entry.strip()]


def _called(item: Any, name: str) -> Any:
    for cls in inspect.getmro(item):
        for module in (cls.__module__, "hf_smartspec.candidates.combined.routed.bandit"):
            if hasattr(importlib.import_module(module), name):
                return getattr(importlib.import_module(module), name)
    raise LookupError(f"{item.__qualname__}: `{name}` is not known")


if __name__ == "__main__":
    main()
