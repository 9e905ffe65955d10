"""README and docs: commands are accepted as printed, examples run, and whatever is named exists."""

import importlib
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import hf_smartspec
from benchmarks import benches
from hf_smartspec import LengthPolicy, goodput
from hf_smartspec.candidates import SourceRequest
from hf_smartspec.commands import main as cli
from hf_smartspec.commands.common import real_model as files

REPOSITORY = Path(__file__).parents[2]
_NAMED = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"]
PAGES = [*(REPOSITORY / name for name in _NAMED), *sorted((REPOSITORY / "docs").rglob("*.md"))]
_COMMANDS = re.compile(r"^(?:smartspec|python -m benchmarks) [^\n]+$", re.MULTILINE)
LINES = sorted({line for page in PAGES for line in _COMMANDS.findall(page.read_text())})
_REAL = 'folder = os.path.expanduser("~/.cache/hf-smartspec/real-model/SmolLM2-135M-Instruct")'
_KNOWN_COST = """
from hf_smartspec.prepare import call
from tests.costs import UnmovedCost

call.load_or_profile = lambda model: UnmovedCost(alpha=0.0, gamma=1e-5, delta=1e-2)
"""
_OUTPUTS = ("--output", "--json", "--plot")
# Of pip, accelerate, torchrun, lm-eval, transformers, guidellm and scripts in demos.
_OTHERS = {
    "--apply_chat_template", "--backend", "--batch_size", "--blocks", "--constraint", "--continuous-batching", "--cpu",
    "--data", "--include_path", "--index-url", "--model_args", "--multi_gpu", "--no_python", "--nproc-per-node",
    "--num_processes", "--own-questions", "--profile", "--targets", "--tasks", "--tokenizer",
}  # fmt: skip


def _name(page: Path) -> str:
    return page.relative_to(REPOSITORY).as_posix()


def _examples(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@cache
def _headings(page: Path) -> list[str]:
    return re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)


def _anchor(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def test_the_pages_show_commands_and_examples():
    assert len(LINES) >= 10
    assert sum(len(_examples(page)) for page in PAGES) >= 8


@pytest.mark.parametrize("line", LINES)
def test_a_command_of_the_pages_is_accepted_as_printed(line):
    words = shlex.split(line, comments=True)
    if words[0] == "python":
        path, arguments = ("benchmarks", words[3]), words[4:]
        parser = benches.load_parser(words[3])
    else:
        path = cli._command_path(words[1:])
        assert path is not None, f"{line!r} names no command"
        arguments = words[1 + len(path) :]
        parser = cli.load_parser(path)
    parser.parse_args(arguments)
    if path == ("transformers",):
        return  # what follows is transformers' own, and may name models of the hub
    others = [arguments[at + 1] for at, word in enumerate(arguments) if word in _OUTPUTS]
    others += [choice for action in parser._actions for choice in action.choices or ()]  # "llama.cpp"
    for word in arguments:
        if " " not in word and re.search(r"[/.]", word) and not re.fullmatch(r"[\d/.]+", word) and word not in others:
            path_named = word.rpartition("=")[2]  # of NAME=PATH
            assert (REPOSITORY / path_named).exists(), f"{word!r} is not in the repository"


def _options(parser: cli.Parser) -> dict[str, object]:
    """Options of a command, and their defaults."""
    return {name: action.default for action in parser._actions for name in action.option_strings}


def test_options_that_the_pages_name_exist():
    parsers = [*map(cli.load_parser, cli.COMMANDS), *map(benches.load_parser, benches.BENCHES)]
    known = {name for parser in parsers for name in _options(parser)} | _OTHERS
    for page in PAGES:
        named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", page.read_text()))
        assert named <= known, f"{page.name}: {sorted(named - known)}"


def test_the_pages_of_the_server_have_all_of_its_options_and_their_defaults():
    options = _options(cli.load_parser(("serve",)))
    pages = [(REPOSITORY / f"docs/{name}.md").read_text() for name in ("server", "cluster")]
    assert set(options) - set(re.findall(r"--[a-z-]+", "".join(pages))) <= {"-h", "--help"}
    rows = re.findall(r"^\| (`--[^|]+) \| ([^|]*)\|", pages[0], re.MULTILINE)
    told = {pair for names, values in rows for pair in zip(re.findall(r"--[\w-]+", names), values.strip().split(", "))}
    numbers = {(name, value) for name, value in told if re.fullmatch(r"[\d.]+", value)}
    assert len(numbers) >= 8
    assert numbers == {(name, str(options[name]).removesuffix(".0")) for name, _ in numbers}


def test_make_knows_the_targets_that_the_pages_name():
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), flags=re.MULTILINE))
    lines = re.compile(r"(?:^|`)make ([a-z-]+)", re.MULTILINE)
    named = {name for page in PAGES for name in lines.findall(page.read_text())}
    assert {"demo", "docs", "test"} <= named <= targets


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_and_named_files_exist(page):
    text = page.read_text()
    for link, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text):
        if link.startswith("https://"):
            continue
        target = page.parent / link if link else page
        assert target.exists(), f"{link!r} leads nowhere"
        assert not anchor or anchor in map(_anchor, _headings(target)), f"{link!r} has no section #{anchor}"
    for path in re.findall(r"`((?:benchmarks|hf_smartspec|candidates|demos|docs|tests)/[\w./-]+\.\w+)`", text):
        assert (REPOSITORY / path).is_file(), f"{path!r} is not in the repository"


def test_anchors_are_those_of_github():
    assert _anchor("The target picks, drafts only guess") == "the-target-picks-drafts-only-guess"
    assert _anchor("`assistant=` of one's own: N_context") == "assistant-of-ones-own-n_context"


def test_every_public_name_is_in_the_pages():
    named = {word for page in PAGES for word in re.findall(r"\w+", page.read_text())}
    exported = {name: getattr(goodput, name) for name in goodput.__all__}
    policies = {name for name, item in exported.items() if isinstance(item, type) and issubclass(item, LengthPolicy)}
    assert len(policies) >= 6 and {*hf_smartspec.__all__, *policies} <= named


def test_the_walk_names_functions_that_exist():
    rows = re.findall(r"^\| `([\w/.]+\.py)` \| ([^|]+) \|", (REPOSITORY / "docs/walk.md").read_text(), re.MULTILINE)
    assert 1 <= len(rows) <= 5, "from prompt to accepted token in at most five files"
    for path, functions in rows:
        names = re.findall(r"`(\w+)`", functions)
        defined = re.findall(r"^ *def (\w+)\(", (REPOSITORY / path).read_text(), flags=re.MULTILINE)
        assert names and set(names) <= set(defined), f"{sorted(set(names) - set(defined))} are not in {path}"


def test_the_walk_has_the_rooms_in_their_order():
    (layers,) = re.findall(
        r'^name = "One way down"\n.*?^layers = \[\n(.*?)^\]',
        (REPOSITORY / "pyproject.toml").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    text = " ".join((REPOSITORY / "docs/walk.md").read_text().split())
    order = " > ".join(re.findall('"(.+)"', layers))
    assert f": {order}." in text


def test_docstrings_cite_sections_that_exist():
    sources = [
        path for folder in ("hf_smartspec", "candidates", "benchmarks") for path in (REPOSITORY / folder).rglob("*.py")
    ]
    cited = [
        (path, page, " ".join(section.split()))
        for path in sources
        for page, section in re.findall(r'\((docs/[\w-]+\.md),\s+"([^"]+)"\)', path.read_text())
    ]
    assert len(cited) >= 5
    for path, page, section in cited:
        found = _headings(REPOSITORY / page)
        assert any(heading.split(":")[0] == section for heading in found), f"{path}: {page} has no section {section!r}"
    assert not [path for path in sources if re.search(r"DESIGN \d|design, section", path.read_text())]


@pytest.mark.long
@pytest.mark.end_to_end
def test_the_examples_of_the_pages_run(tmp_path):
    """
    One after the other in one process: the README's define `model`, `draft` and `inputs`. Those of papers' pages stand
    alone. The speed of models is not measured, which takes as long as the examples themselves.
    """
    (tmp_path / "demos").symlink_to(REPOSITORY / "demos")
    script = tmp_path / "pages.py"
    few = "max_new_tokens=64", "max_new_tokens=16"  # tokens: more show nothing else
    blocks = [(_name(page), example.replace(*few)) for page in PAGES for example in _examples(page)]
    if files.real_model() is None:  # the embedded target runs the README's first example
        blocks = [(name, text.replace(_REAL, 'folder = "demos/models/target"')) for name, text in blocks]
    run = "exec(compile(text, page, 'exec'), {} if page.startswith('docs/papers/') else names)"
    script.write_text(f"{_KNOWN_COST}names = {{}}\nfor page, text in {blocks!r}:\n    {run}\n")
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment["HF_HOME"] = str(tmp_path / "home")
    done = subprocess.run([sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.end_to_end
@pytest.mark.usefixtures("real_folder")
def test_the_first_example_prints_what_the_readme_shows(capsys, monkeypatch):
    """All but its counts, which differ between machines."""
    monkeypatch.chdir(REPOSITORY)
    text = (REPOSITORY / "README.md").read_text()
    outputs = re.findall(r"^```text\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    example = _examples(REPOSITORY / "README.md")[0]
    assert _REAL in example
    (shown,) = [output for output in outputs if text.index(output) > text.index(example)]
    exec(compile(example, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert re.sub(r"\d+( forwards|% of)", r"#\1", printed) == re.sub(r"\d+( forwards|% of)", r"#\1", shown)
    assert len(shown.splitlines()) == 3 and "pad" not in shown


def test_the_readme_shows_three_lines_for_a_model_of_ones_own_first(real_model, real_tokenizer):
    lines = re.search(r"^```py\n(.*?)^```", (REPOSITORY / "README.md").read_text(), re.MULTILINE | re.DOTALL)[1]
    assert len(lines.splitlines()) <= 4
    model, inputs = real_model(torch.bfloat16), real_tokenizer("The capital of France is", return_tensors="pt")
    names = {"model": model, "inputs": inputs | {"max_new_tokens": 8}}
    try:
        exec(compile(lines, "README.md", "exec"), names)
    finally:
        hf_smartspec.disable(model)
    assert "Paris" in real_tokenizer.decode(names["output"][0])


def test_the_example_of_a_source_is_short():
    assert len((REPOSITORY / "demos/examples/ngram_source.py").read_text().splitlines()) <= 60


def test_the_example_of_a_source_keeps_namespaces_apart(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "demos/examples"))
    source = importlib.import_module("ngram_source").NGramCandidates()
    for name, prompt, namespace in (("a", [1, 2, 3, 1, 2], "one"), ("b", [1, 2], "one"), ("c", [1, 2], "another")):
        source.begin(SourceRequest(name, np.array(prompt), namespace=namespace))
    assert [tree.tokens.tolist() for tree in source.propose(["a", "b", "c"], [2] * 3)] == [[3, 1], [3, 1], []]
