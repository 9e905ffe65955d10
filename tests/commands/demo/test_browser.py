"""The page in a browser without a screen: one session through its tabs, at a desk's and a phone's width."""

import threading

import pytest

from ...browser import DESK, NEEDED, PHONE
from .conftest import GRADIO

pytestmark = [NEEDED, GRADIO, pytest.mark.end_to_end]
TIMEOUT = 120_000  # milliseconds, which only a failure takes


@pytest.fixture(scope="module")
def address(world):
    from hf_smartspec.commands.demo.app import build_app, launch_app

    app = build_app(world)
    yield launch_app(app)
    app.close()


def _open(browser, address, size=DESK):
    page = browser.new_page(viewport=size, reduced_motion="reduce")
    page.set_default_timeout(TIMEOUT)
    page.asked, page.failures = set(), []
    page.on("request", lambda request: page.asked.add(request.url))
    page.on("pageerror", lambda error: page.failures.append(error))
    page.goto(address)
    page.wait_for_selector("#ss-race-start")
    return page


def _shorten(page):
    """Ask for 16 tokens, and for drafts in every step: how many pay is a matter of time, on a busy machine none."""
    page.get_by_role("button", name="Decoding and length").click()
    name = "New tokens at most"
    while page.get_by_label(f"range slider for {name}").first.input_value() != "16":  # the page may not listen yet
        page.get_by_label(f"number input for {name}").first.fill("16")
        page.keyboard.press("Tab")
    page.get_by_label("Draft nodes in every step").click()
    page.get_by_role("option", name="4", exact=True).click()


def test_a_race_is_run_drawn_and_stays_on_this_machine(browser, address):
    page = _open(browser, address)
    _shorten(page)
    page.click("#ss-race-start")
    page.wait_for_selector(".ss-race.over")
    counts = page.locator(".ss-lane .ss-count").all_inner_texts()
    assert counts == ["16", "16"] and "Identical." in page.inner_text(".ss-verdict")
    assert page.locator(".ss-lane.drafted .t.on").count() == 16
    page.wait_for_selector(".ss-tree")
    page.get_by_label("number input for Step").fill("1")
    page.keyboard.press("Tab")
    page.wait_for_selector("text=Step 1 of")
    page.wait_for_selector("#ss-race-start:not([disabled])")
    page.fill("#ss-prompt textarea", "  ")
    page.click("#ss-race-start")
    page.wait_for_selector(".ss-notice.wrong >> text=There is no prompt yet")
    page.wait_for_selector("#ss-race-start:not([disabled])")
    hosts = {url.split("/")[2] for url in page.asked if url.startswith("http")}
    assert hosts == {address.split("/")[2]} and hosts.pop().startswith("127.0.0.1:")
    assert not page.failures
    page.close()


def test_two_browser_tabs_wait_for_one_another_and_stop_alone(browser, address, world):
    """The second waits in line until the first is stopped; pressing stop in one leaves the other alone."""
    first, second = _open(browser, address), _open(browser, address)
    _shorten(second)
    held, release = threading.Event(), threading.Event()

    def hold():
        held.set()
        release.wait(TIMEOUT / 1000)

    world.worker.submit(hold)  # nothing is computed meanwhile
    assert held.wait(TIMEOUT / 1000)
    first.click("#ss-race-start")
    first.wait_for_selector("text=warming up")
    second.click("#ss-race-start")
    second.wait_for_selector("text=Waiting for its turn")
    first.click("#ss-race-stop")
    release.set()
    first.wait_for_selector("text=Stopped: a race is shown")
    second.wait_for_selector(".ss-race.over")
    assert "Identical." in second.inner_text(".ss-verdict")
    assert not first.failures and not second.failures
    first.close()
    second.close()


# Whatever shows in part only, because something around it ends before it does, and is not scrolled by its reader.
_CLIPPED = """() => [...document.querySelectorAll(".gradio-container *")].filter(item => {
  const {width, right} = item.getBoundingClientRect();
  return width > 1 && right > innerWidth && !item.closest(".ss-scroll");
}).map(item => item.outerHTML.slice(0, 80))"""
_ARROWS = """() => [...document.querySelectorAll("input[role=combobox], input[role=listbox]")].map(input => {
  const arrow = input.parentElement.querySelector("svg").getBoundingClientRect();
  return [arrow.left - input.getBoundingClientRect().right, arrow.width];
}).filter(([, width]) => width > 0)"""


@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_texts_of_drop_downs_end_before_their_arrows(browser, address, size):
    page = _open(browser, address, size)
    page.get_by_role("button", name="Decoding and length").click()
    page.wait_for_selector("text=Draft nodes in every step >> visible=true")
    gaps = [gap for gap, _ in page.evaluate(_ARROWS)]
    assert len(gaps) == 3 and min(gaps) >= 0
    page.close()


def test_figures_of_loads_fit_on_a_phone(browser, address):
    """Of two runs, shown as the page shows them: names of runs above, names of figures on the left."""
    from hf_smartspec.commands.demo.load import LoadRun, LoadSettings, load_html

    steps = [(0.1 * step, 8, 24, 1234) for step in range(50)]
    names = ("no speculation", "plain"), ("suffix + draft", "drafted")
    runs = [LoadRun(name, kind, seconds=5.0, num_sent=120, steps=steps, was_cut=True) for name, kind in names]
    page = _open(browser, address, PHONE)
    page.get_by_role("tab", name="Load").click()
    page.wait_for_selector("#ss-load-result >> visible=true")
    shown = load_html("", LoadSettings("suffix + draft", ["sql"]), runs)
    page.evaluate("html => document.querySelector('#ss-load-result .prose').innerHTML = html", shown)
    frame = "#ss-load-result .ss-scroll"
    assert page.eval_on_selector(frame, "frame => frame.scrollWidth <= frame.clientWidth")
    cells = page.locator(f"{frame} :is(th, td)")
    assert cells.evaluate_all("cells => cells.every(cell => cell.scrollWidth <= cell.clientWidth)")
    lefts = page.locator(f"{frame} thead th").evaluate_all("cells => cells.map(cell => cell.offsetLeft)")
    assert len(lefts) == 6 and len(set(lefts)) == 1
    page.close()


def test_all_fits_on_a_phone(browser, address):
    page = _open(browser, address, PHONE)
    _shorten(page)
    page.click("#ss-race-start")
    page.wait_for_selector(".ss-svg")
    for name in ("Race", "Load", "Learning"):
        page.get_by_role("tab", name=name).click()
        page.wait_for_selector(f"#ss-{name.lower()}-start >> visible=true")
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        assert page.evaluate(_CLIPPED) == [], f"{name}: cut off, with no way to scroll there"
    is_dark = page.evaluate("document.body.classList.contains('dark')")
    page.click(".ss-theme")
    assert page.evaluate("document.body.classList.contains('dark')") is not is_dark
    page.close()
