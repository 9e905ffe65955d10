"""The page answers under the names of this machine only: a page of others may give its own name this address."""

import httpx
import pytest

from hf_smartspec.serving.server.guard.hosts import local_hosts

from ...serving.helpers import TIMEOUT
from .conftest import GRADIO

pytestmark = GRADIO


@pytest.fixture
def url():
    import gradio

    from hf_smartspec.commands.demo.app import launch_app

    with gradio.Blocks(analytics_enabled=False) as page:
        gradio.HTML("the page")
    yield launch_app(page)
    page.close()


def test_other_names_are_refused(url):
    for path in ("/", "/config", "/gradio_api/info", "/gradio_api/queue/data?session_hash=x"):
        refused = httpx.get(url.rstrip("/") + path, headers={"Host": "evil.example"}, timeout=TIMEOUT)
        assert refused.status_code == 403 and "127.0.0.1" in refused.json()["error"]["message"]
    for name in ("localhost:7860", "127.0.0.1", "[::1]:80"):
        assert httpx.get(url, headers={"Host": name}, timeout=TIMEOUT).status_code == 200


def test_what_others_can_reach_has_any_name():
    assert local_hosts("0.0.0.0") is local_hosts("192.168.0.1") is None
    assert "localhost" in local_hosts("localhost") == local_hosts("::1") == local_hosts("127.0.0.1")
