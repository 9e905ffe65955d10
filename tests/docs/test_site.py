"""The pages as a site: it is built strictly, fetches nothing from elsewhere, and says what the code says."""

import logging
import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

import hf_smartspec
from hf_smartspec import candidates

from ..browser import BROKEN_WORDS, DESK, NEEDED, PHONE

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    """Theme and plugins log messages of their own, and mkdocs does not remove its handlers."""
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    handlers = logging.getLogger("mkdocs").handlers[:]
    yield
    logging.getLogger("mkdocs").handlers[:] = handlers


@pytest.fixture
def tools(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS / "tools"))
    yield
    for name in ("parameters", "draw", "hooks"):
        sys.modules.pop(name, None)


def _built(folder, **changes):
    config = load_config(str(REPOSITORY / "mkdocs.yml"), strict=True, site_dir=str(folder), **changes)
    config.plugins.run_event("startup", command="build", dirty=False)
    try:
        build(config)
    finally:
        config.plugins.run_event("shutdown")
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        patch.chdir(REPOSITORY)  # the reference is looked for here
        return _built(tmp_path_factory.mktemp("site"))


@pytest.mark.long
@pytest.mark.end_to_end
def test_every_page_is_in_the_site_and_no_link_is_broken(site):
    for page in PAGES:
        assert (site / page.relative_to(DOCS).with_suffix(".html")).exists()


@pytest.mark.long
@pytest.mark.end_to_end
def test_the_site_fetches_nothing_from_elsewhere(site):
    pages = [*site.rglob("*.html"), *site.rglob("*.css")]
    loaded = r"""(?:<(?:script|img|iframe|source)\b[^>]*\bsrc=|<link\b[^>]*\bhref=|url\()["']?(?:https?:)?//[^"'>)]*"""
    fetched = {found for page in pages for found in re.findall(loaded, page.read_text())}
    assert len(pages) > len(PAGES) and not fetched


@pytest.mark.long
@pytest.mark.end_to_end
def test_the_reference_shows_every_public_name(site):
    reference = (site / "reference.html").read_text()
    for name in hf_smartspec.__all__:
        assert f'id="hf_smartspec.{name}"' in reference
    for name in set(candidates.__all__) - set(hf_smartspec.__all__):
        assert f'id="hf_smartspec.candidates.{name}"' in reference


@NEEDED
@pytest.mark.long
@pytest.mark.end_to_end
@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_tables_break_no_word_and_scroll_in_their_own_frames(site, browser, size):
    page = browser.new_page(viewport=size)
    for name in ("overview", "peers", "policies", "reference", "security", "sources", "walk", "sources/suffix-trees"):
        page.goto((site / f"{name}.html").as_uri())
        assert page.locator(".md-typeset__scrollwrap").count() > 0
        assert page.evaluate(BROKEN_WORDS) == [], name
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"], name
    page.close()


@NEEDED
@pytest.mark.long
@pytest.mark.end_to_end
def test_cells_of_text_have_several_words_to_a_line(site, browser):
    page = browser.new_page(viewport=PHONE)
    page.goto((site / "security.html").as_uri())
    widths = page.locator("td[data-text]").evaluate_all("cells => cells.map(cell => cell.clientWidth)")
    assert len(widths) > 20 and min(widths) >= 120
    page.close()


@pytest.fixture
def small(tmp_path):
    """Builds a site of one page beside the glossary."""
    docs = tmp_path / "docs"
    shutil.copytree(DOCS / "tools", docs / "tools")
    shutil.copy(DOCS / "site.css", docs)
    (docs / "glossary.md").write_text("# Glossary\n")

    def built(text):
        (docs / "index.md").write_text(f"# Index\n\n{text}\n")
        return _built(tmp_path / "site", docs_dir=str(docs), nav=["index.md", "glossary.md"], plugins=[])

    return built


@pytest.mark.parametrize(
    "text",
    ["[a page](nowhere.md)", "[a section](glossary.md#nowhere)", "[a file](../nowhere.py)", "text\n- a list"],
    ids=["page", "section", "file", "list"],
)
def test_what_leads_nowhere_or_reads_otherwise_on_a_forge_fails(small, text):
    with pytest.raises(Abort, match="1 warnings in strict mode"):
        small(text)


def test_links_are_those_of_the_site(small):
    text = "[a section](glossary.md#glossary), [a file](../pyproject.toml)\n\n- a list"
    page = (small(text) / "index.html").read_text()
    assert 'href="glossary.html#glossary"' in page and "pyproject.toml" not in page and "a file" in page


def test_tables_and_files_in_pages_are_those_of_the_code(tools):
    import parameters

    found = [name for page in PAGES for name in re.findall(r"<!-- parameters: ([\w.]+) -->", page.read_text())]
    assert found
    for page in PAGES:
        assert parameters.renewed(page.read_text()) == page.read_text(), "`make docs` writes them anew"


def test_pictures_are_those_that_are_drawn(tools):
    import draw

    for name, picture in draw.DRAWN.items():
        assert (draw.PICTURES / f"{name}.svg").read_text() == picture().svg(), "`python docs/tools/draw.py` draws them"


def test_changes_and_citation_name_the_version():
    assert f"## {hf_smartspec.__version__}" in (REPOSITORY / "CHANGELOG.md").read_text()
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert citation["version"] == hf_smartspec.__version__ and len(citation["references"]) >= 5
