"""
Settings of the whole test suite. What is heavy is imported where it is used: the process that hands out the tests of
several workers needs nothing of it.
"""

import gc
import logging
import ssl
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

from .covering import IS_EXHAUSTIVE, examples, in_part

settings.register_profile("quick", deadline=None, derandomize=True, max_examples=examples(60), print_blob=True)
settings.load_profile("quick")


def pytest_configure(config):
    # A break in transformers is seen early when its deprecation messages are failures.
    for module in ("transformers", "hf_smartspec", "tests"):
        config.addinivalue_line("filterwarnings", f"error::FutureWarning:{module}")
        config.addinivalue_line("filterwarnings", f"error::DeprecationWarning:{module}")
    # Arguments of forwards that have another name now: whoever calls a module, torch's `__call__` is named.
    config.addinivalue_line("filterwarnings", r"error:`\w+` is deprecated:FutureWarning:torch\.nn\.modules\.module")


def pytest_collection_finish():
    gc.freeze()  # a million objects of imported packages, which tests that collect garbage need not look at


def pytest_collection_modifyitems(config, items):
    if not IS_EXHAUSTIVE and not any("::" in arg for arg in config.args):  # who names a test gets all of it
        left_out = [mark for mark in ("exhaustive", "end_to_end") if mark not in config.option.markexpr]
        run = set(in_part([item for item in items if not any(map(item.get_closest_marker, left_out))]))
        config.hook.pytest_deselected(items=[item for item in items if item not in run])
        items[:] = [item for item in items if item in run]
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


class _NoDeprecations(logging.Handler):
    """transformers logs most of its deprecations instead of warning."""

    is_strict = True

    def emit(self, record):
        if not self.is_strict:
            return
        message = record.getMessage()
        if "deprecat" in message.lower():
            raise AssertionError(f"transformers announces a deprecation: {message}")


@pytest.fixture(autouse=True, scope="session")
def _strict_session():
    """One thread per process, since tests run side by side; logged deprecations are errors."""
    import torch

    torch.set_num_threads(1)
    handler = _NoDeprecations()
    logging.getLogger("transformers").addHandler(handler)
    yield
    logging.getLogger("transformers").removeHandler(handler)


@pytest.fixture(autouse=True, scope="session")
def _freeze():
    """
    Function that does what `gc.freeze` does. Commands unfreeze all objects when they end: from then on, each collection
    of garbage would go through all imported packages.
    """
    freeze = gc.freeze
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "freeze", lambda: None)
        patch.setattr(gc, "unfreeze", lambda: None)
        yield freeze


@pytest.fixture(autouse=True, scope="module")
def _imports_stay_frozen(_freeze):
    """Also those of large packages that a module's tests import while they run."""
    num_before = len(sys.modules)
    yield
    if len(sys.modules) > num_before + 100:
        gc.collect()
        _freeze()


@pytest.fixture(autouse=True, scope="session")
def _certificates_are_read_once():
    """Each client of HTTP reads those of all authorities, which takes longer than most answers of tests' servers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", cache(ssl.create_default_context))
        yield


@pytest.fixture(autouse=True, scope="session")
def _equal_models_are_tried_once():
    """
    A written-out decoder that a trial has found right is right in equal models: trials cost more than most tests'
    tokens. Where it is wrong, each model has its own trial, and so it has in tests with the fixture `every_trial`.
    """
    from hf_smartspec.target_model.written import registry

    from .identity import identity

    right: set[bytes | None] = set()
    check = registry.check

    def check_once(model, decoder):
        own = identity(model)
        if own not in right:
            check(model, decoder)
            right.update({own} - {None})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "check", check_once)
        yield


@pytest.fixture
def every_trial(monkeypatch):
    """For tests of trials, and of what a model's first forwards do."""
    from hf_smartspec.target_model.written import registry, trial

    monkeypatch.setattr(registry, "check", trial.check)


@pytest.fixture
def any_number_of_tokens(monkeypatch):
    """Compile forwards of any number of tokens, also on CPUs where torch's own products of many are faster."""
    from hf_smartspec.cpu import few_tokens

    monkeypatch.setattr(few_tokens, "_most_tokens", lambda dtype: few_tokens.ANY)
    few_tokens.most_tokens.cache_clear()
    yield
    monkeypatch.undo()
    few_tokens.most_tokens.cache_clear()


@pytest.fixture(scope="session")
def real_folder():
    """Folder of a real model, SmolLM2-135M-Instruct in float32, and its tokenizer. Skips where it was not fetched."""
    from hf_smartspec.commands.common.real_model import NAME, real_model

    folder = reason = None
    try:
        folder = real_model()
    except OSError as error:  # such as a full disk
        reason = error
    if folder is None:
        pytest.skip(f"{NAME} is not here: `make setup` fetches it, with a network{f' ({reason})' if reason else ''}")
    return Path(folder)


@pytest.fixture(scope="session")
def real_model(real_folder):
    """Function that returns that model in a `torch.dtype`: one for the whole session, which tests leave as it is."""
    from transformers import AutoModelForCausalLM

    @cache
    def load(dtype):
        return AutoModelForCausalLM.from_pretrained(real_folder, dtype=dtype).eval().requires_grad_(False)

    return load


@pytest.fixture(scope="session")
def real_tokenizer(real_folder):
    """Tokenizer of that model, which pads on the left."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(real_folder, padding_side="left")


@pytest.fixture
def said_at_info(caplog):
    """Record of the log, from level INFO on. The library's level follows transformers' again afterwards."""
    root = logging.getLogger("hf_smartspec")
    root.setLevel(logging.INFO)
    yield caplog
    root.setLevel(logging.NOTSET)


@pytest.fixture(scope="module")
def browser():
    """Chromium. Tests that use it are marked `tests.browser.NEEDED`."""
    from .browser import launched

    with launched() as browser:
        yield browser


@pytest.fixture
def deprecated_by_itself(monkeypatch):
    """For tests of code of transformers that uses what transformers deprecates."""
    monkeypatch.setattr(_NoDeprecations, "is_strict", False)


# Tests that compare many cases add their counts under this name (`record_property`); the last lines of the run sum them
# up, over all workers.
COUNTS = "exactness"
# Tests of architectures add how these were served, by name: one way of single rows and one of ragged ones.
WAYS = "ways"


def pytest_terminal_summary(terminalreporter):
    total: Counter = Counter()
    ties: list[str] = []
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == COUNTS and report.when == "call":
                    total.update(value["counts"])
                    ties += value["ties"]
    if total:
        names = ("cases", "tokens", "drafted", "accepted", "ties", "differences")
        terminalreporter.write_line("exactness: " + ", ".join(f"{total[name]:,} {name}" for name in names))
        for tie in ties[:20]:
            terminalreporter.write_line(f"  {tie}")
    report_ways(terminalreporter)


def report_ways(terminalreporter):
    """How many architectures were served in which way, and the reasons of those that were decoded plainly."""
    served: dict[str, list[str]] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == WAYS and report.when == "call":
                    served |= value
    if served:
        counts = Counter(routes[0].split(":")[0] for routes in served.values())
        terminalreporter.write_line("architectures: " + ", ".join(f"{num} {way}" for way, num in counts.most_common()))
        for name, routes in sorted(served.items()):
            for route in dict.fromkeys(route for route in routes if route.startswith("plain: ")):
                terminalreporter.write_line(f"  {name} {route}")


@pytest.fixture(autouse=True)
def _known_lengths(request, monkeypatch):
    """
    Drafts are as long as their sources make them: what is tested does not depend on the machine's speed. Tests of the
    goodput auction (marked `adaptive`) get a forward of 10 ms in which a token costs hardly anything, unmeasured.
    """
    from hf_smartspec import SmartSpecConfig

    from .costs import UnmovedCost

    if request.node.get_closest_marker("adaptive"):
        cost = UnmovedCost(alpha=0.0, gamma=1e-5, delta=1e-2)
        monkeypatch.setattr("hf_smartspec.prepare.call.load_or_profile", lambda model: cost)
    else:
        monkeypatch.setattr(
            SmartSpecConfig, "policy_for", lambda config, source: config.policy or config.fixed_policy_for(source)
        )


@pytest.fixture(autouse=True)
def _one_thread_stays():
    """Commands and benches set another number, and all later tests would wait for threads that find no processor."""
    import torch

    yield
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _verbosity_stays():
    """Servers and commands change transformers', which this library's loggers follow."""
    logger = logging.getLogger("transformers")
    before = logger.level
    yield
    logger.setLevel(before)
