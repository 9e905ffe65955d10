"""What mkdocs does to pages that are written to be read on a forge, too: see mkdocs.yml."""

import logging
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

REPOSITORY = Path(__file__).parents[2]
DOCS = "docs/"
# Pages that lie elsewhere in the repository, and where the site has them.
ELSEWHERE = {
    "README.md": "overview.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "reporting.md",
    "demos/models/README.md": "embedded-models.md",
    "demos/prompts.md": "prompts.md",
}
_HOME = {site: source for source, site in ELSEWHERE.items()}
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s#]*)(#[^()\s]*)?\)")
_REFERENCE = re.compile(r"^<!-- (::: [\w.]+) -->$", re.MULTILINE)
_FENCE = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
_CELL = re.compile(r"<td([^>]*)>(.*?)</td>", re.DOTALL)
_CODE = re.compile(r"<code>.*?</code>", re.DOTALL)
_TAG = re.compile(r"<[^>]*>")
# After these, code may go on in a new line; what stands in tags is no code.
_AFTER = re.compile(r"([/(]|=(?!\d)|\.(?=[A-Za-z]{5}))(?=[\w\"'])(?![^<]*>)")
_TEXT_LEN = 24  # characters of a cell, from which on its lines should have several words
log = logging.getLogger("mkdocs.hooks.pages")  # warnings fail `--strict`


def on_files(files, config):
    for source, site in ELSEWHERE.items():
        if repr(site) in repr(config.nav):
            files.append(File.generated(config, site, abs_src_path=str(REPOSITORY / source)))
    return files


def on_page_markdown(markdown, page, **_):
    site = page.file.src_uri
    source = _HOME.get(site, DOCS + site)
    parts = _FENCE.split(markdown)
    for at in range(0, len(parts), 2):  # the others are code
        _check_lists(source, parts[at])
        parts[at] = _REFERENCE.sub(r"\1", parts[at])
        parts[at] = _LINK.sub(lambda match: _relinked(match, source, site), parts[at])
    for fence in parts[1::2]:
        if re.match(r" {1,3}`", fence):
            log.warning("%s: a block of code in a list needs four spaces: %r", source, fence[:40])
    return "".join(parts)


def on_page_content(html, **_):
    """Mark cells of text, to which `site.css` gives room, and show where code in cells may be broken."""
    return _CELL.sub(_laid_out, html)


def _laid_out(match):
    attributes, cell = match[1], match[2]
    if len(_TAG.sub("", cell)) >= _TEXT_LEN:
        attributes += " data-text"
    cell = _CODE.sub(lambda code: _AFTER.sub(r"\1<wbr>", code[0]), cell)
    return f"<td{attributes}>{cell}</td>"


def _relinked(match, source, site):
    """The same link from where the site has the page, or only its text where the site has no such page."""
    image, text, link, anchor = match[1], match[2], match[3], match[4] or ""
    if not link or ":" in link:
        return match[0]
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    if not (REPOSITORY / target).exists():
        log.warning("%s: link to %r, which is not in the repository", source, link)
        return text
    if target.startswith(DOCS) and (REPOSITORY / target).is_file():
        target = target.removeprefix(DOCS)
    elif target in ELSEWHERE:
        target = ELSEWHERE[target]
    else:
        return text
    return f"{image}[{text}]({posixpath.relpath(target, posixpath.dirname(site) or '.')}{anchor})"


def _check_lists(source, text):
    """Forges begin a list behind any line, Python-Markdown behind an empty one only."""
    before = ""
    for line in text.split("\n"):
        is_item = re.match(r"([-*]|\d+\.) ", line)
        if is_item and before.strip() and not re.match(r"([-*]|\d+\.) |\s", before) and not _in_list(text, before):
            log.warning("%s: no empty line before the list at %r", source, line[:60])
        before = line


def _in_list(text, line):
    """Whether the line continues an item without being indented."""
    above = text[: text.index(line)].rstrip("\n").split("\n")
    return bool(above and re.match(r"([-*]|\d+\.) ", above[-1]))
