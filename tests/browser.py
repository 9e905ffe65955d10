"""A browser without a screen, at a phone's and a desk's width. Tests of pages use the fixture `browser`."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in _NAMES if (path := shutil.which(name))), None)
NEEDED = pytest.mark.skipif(
    CHROMIUM is None or find_spec("playwright") is None, reason="no Chromium is installed here, or no Playwright"
)
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1280, "height": 900}

# Words of tables that are broken into two lines, within them.
BROKEN_WORDS = """() => {
  const broken = [];
  for (const cell of document.querySelectorAll("td, th")) {
    const walker = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
    for (let node; (node = walker.nextNode()); ) {
      for (const word of node.data.matchAll(/[\\p{L}\\p{N}]+/gu)) {
        const range = document.createRange();
        range.setStart(node, word.index);
        range.setEnd(node, word.index + word[0].length);
        if (new Set([...range.getClientRects()].map(line => Math.round(line.top))).size > 1) broken.push(word[0]);
      }
    }
  }
  return broken;
}"""


@contextmanager
def launched() -> Iterator:
    """A Chromium, driven by Playwright, whose loop keeps asyncio's from running in this thread until it ends."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-quic"])
        yield browser
        browser.close()
