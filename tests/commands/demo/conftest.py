import argparse

import pytest

from hf_smartspec.commands.demo.arguments import add_arguments
from hf_smartspec.commands.demo.world import load_world
from hf_smartspec.commands.main import Parser


@pytest.fixture(scope="package")
def world():
    """The embedded models at their own size, in the dtype in which texts must be identical."""
    parser: argparse.ArgumentParser = Parser()
    add_arguments(parser)
    world = load_world(parser.parse_args(["--parameters", "0", "--dtype", "float32", "--device", "cpu"]))
    yield world
    world.worker.shutdown()
