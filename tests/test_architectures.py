"""The promise for all causal language models of transformers, behind the lengths at which they change their ways."""

import pytest

from .architectures import NAMES, REPRESENTATIVE, serve, small_model
from .conftest import WAYS
from .test_exactness import IS_EXHAUSTIVE


@pytest.mark.parametrize("name", NAMES if IS_EXHAUSTIVE else REPRESENTATIVE)
def test_every_causal_language_model_generates_the_plain_tokens(name, monkeypatch, record_property):
    served = serve(small_model(name), monkeypatch)
    record_property(WAYS, {name: list(served.routes.values())})
    assert not served.differences, served.differences
    if all(route.startswith("plain: ") for route in served.routes.values()):
        assert served.drafted == 0, "nothing is drafted where nothing can be verified"
    else:
        assert served.drafted > 0 and served.accepted > 0
