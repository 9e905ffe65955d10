"""Commands run a model in the dtype of its files, unless told otherwise."""

import argparse
import importlib

import pytest
import torch
from transformers import LlamaForCausalLM

from hf_smartspec.commands.common.setup import load_target
from hf_smartspec.commands.main import COMMANDS, load_parser
from hf_smartspec.commands.profile import command as profile
from hf_smartspec.commands.serve.serving import load_served
from hf_smartspec.serving.server.guard.limits import Limits
from hf_smartspec.serving.server.metrics import ServerMetrics

OWN = [("bench", "generate"), ("bench", "load"), ("generate",), ("chat",), ("serve",), ("demo",), ("profile",)]


@pytest.fixture(params=["float32", "bfloat16"])
def saved(request, folder, tmp_path):
    model = LlamaForCausalLM.from_pretrained(folder / "target", dtype=getattr(torch, request.param))
    model.save_pretrained(tmp_path / "model")
    for file in (folder / "target").glob("token*"):
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    return request.param, tmp_path / "model"


@pytest.mark.parametrize("command", OWN)
def test_the_default_is_that_of_the_files(command):
    parser = load_parser(command)
    assert command in COMMANDS and parser.get_default("dtype") == "auto"


def test_benches_load_and_report_it(saved):
    dtype, folder = saved
    parser = argparse.ArgumentParser()
    importlib.import_module("hf_smartspec.commands.common.arguments").add_target_arguments(parser)
    args = parser.parse_args(["--model", str(folder), "--device", "cpu"])
    model, _ = load_target(args)
    assert model.dtype == getattr(torch, dtype) and args.dtype == dtype
    args = parser.parse_args(["--model", str(folder), "--device", "cpu", "--dtype", "float16"])
    assert load_target(args)[0].dtype == torch.float16


def test_profiles_and_servers_too(saved):
    dtype, folder = saved
    args = load_parser(("profile",)).parse_args([str(folder), "--device", "cpu"])
    assert profile._load(args).dtype == getattr(torch, dtype)
    args = load_parser(("serve",)).parse_args([str(folder), "--device", "cpu"])
    served = load_served(args, "it", str(folder), Limits(), ServerMetrics())
    try:
        assert served.engine.model.dtype == getattr(torch, dtype)
    finally:
        served.engine.stop()
