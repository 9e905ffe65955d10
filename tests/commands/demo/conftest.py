import argparse
from importlib.util import find_spec

import pytest

from hf_smartspec.commands.demo.arguments import add_arguments
from hf_smartspec.commands.demo.world import load_world
from hf_smartspec.commands.main import Parser

# The package takes seconds to import: tests import it where they run, not where they are collected.
GRADIO = pytest.mark.skipif(find_spec("gradio") is None, reason="the page is made with Gradio")


def _world(*arguments):
    parser: argparse.ArgumentParser = Parser()
    add_arguments(parser)
    return load_world(parser.parse_args([*arguments, "--dtype", "float32", "--device", "cpu"]))


@pytest.fixture(scope="package")
def world():
    """The embedded models at their own size, in the dtype in which texts must be identical."""
    world = _world("--parameters", "0")
    yield world
    world.worker.shutdown()


@pytest.fixture
def default_world():
    """Function that returns the world of a command line without models."""
    return _world
