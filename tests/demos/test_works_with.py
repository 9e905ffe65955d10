"""Other people's libraries on top of `generate` and the engine: the examples of docs/works-with.md, run as they are."""

import re
from contextlib import suppress

import pytest
from transformers.utils import logging

from hf_smartspec.commands.common.real_model import FILE

from ..covering import part_of
from ..models import RECURRENT
from .examples import EXAMPLES, load_example

REPOSITORY = EXAMPLES.parents[1]
PAGE = (REPOSITORY / "docs/works-with.md").read_text(encoding="utf-8")
SECTIONS = re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)

# By what they need, the longest first: example, arguments.
CASES = {
    "lm_eval": ("evaluate", 6),
    "llguidance": ("grammar",),
    "bitsandbytes": ("quantized", ["--by", "bitsandbytes", "--max-new-tokens", "12"]),
    "torchao": ("quantized", ["--by", "torchao", "--max-new-tokens", "12"]),
    "peft": ("adapters",),
    "datasets": ("map_dataset",),
    "gguf": ("gguf_file",),
    "accelerate": ("offloaded",),
    "transformers": ("pipelines",),
    "transformers.models.qwen3_5": ("hybrids",),
}
SLOW = "datasets", "lm_eval"  # to import


@pytest.fixture
def at_home(monkeypatch, tmp_path):
    """In the repository's root, where examples expect to be run; what they keep stays out of the user's cache."""
    monkeypatch.chdir(REPOSITORY)
    with suppress(ImportError):
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    verbosity = logging.get_verbosity()
    yield
    logging.set_verbosity(verbosity)


@pytest.mark.long
@pytest.mark.end_to_end
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of names that others still use
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("package", part_of(CASES, *(name for name in CASES if name not in SLOW)))
def test_examples_give_what_comes_without_us(at_home, package):
    if package == "transformers.models.qwen3_5" and not RECURRENT:
        pytest.skip("this release's layers with states are not known")
    pytest.importorskip(package, reason=f"{package} is not installed")
    if package == "gguf" and not FILE.is_file():
        pytest.skip(f"{FILE.name} is not here: `make setup` fetches it, with a network")
    name, *arguments = CASES[package]
    plain, fast, statistics = load_example(name).main(*arguments)
    assert plain and fast == plain
    assert statistics.drafted_tokens > 0 and statistics.accepted_tokens > 0


def test_the_page_shows_lines_of_the_examples_that_it_names():
    assert len(SECTIONS) >= len(CASES)
    named = set()
    for title, text in SECTIONS:
        files = re.findall(r"^python demos/examples/(\w+)\.py", text, re.MULTILINE)
        source = "".join((EXAMPLES / f"{name}.py").read_text(encoding="utf-8") for name in files)
        lines = {line.strip().removesuffix("  # the line") for line in source.splitlines()}
        for block in re.findall(r"^```py\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            missing = {line.strip() for line in block.splitlines()} - lines - {""}
            assert files and not missing, f"{title}: {missing}"
        named |= set(files)
    pages_of_their_own = {"ngram_source", "tensor_parallel"}
    assert named | pages_of_their_own == {file.stem for file in EXAMPLES.glob("*.py")}


def test_examples_are_short():
    for file in EXAMPLES.glob("*.py"):
        assert 20 <= len(file.read_text(encoding="utf-8").splitlines()) <= 90, file.name
