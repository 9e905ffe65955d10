"""Targets that two processes hold together, by transformers' `tp_plan`, over gloo."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ..covering import IS_EXHAUSTIVE

pytestmark = [pytest.mark.long, pytest.mark.end_to_end]  # all in one worker, which starts the processes once
REPOSITORY = Path(__file__).parents[2]
SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 2048, "head_dim": 16}  # fmt: skip
_LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TYPES = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "gemma2": {"sliding_window": 8},
}
if not IS_EXHAUSTIVE:
    TYPES = {"llama": TYPES["llama"]}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What both processes have said, by test."""
    folders = []
    for name, options in TYPES.items():
        torch.manual_seed(0)
        folder = tmp_path_factory.mktemp(name)
        config = AutoConfig.for_model(name, **SIZES, **options, initializer_range=0.3)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        folders.append(str(folder))
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    said = str(tmp_path_factory.mktemp("said") / "rank")
    run = subprocess.run(
        [*_LAUNCHER, "-m", "tests.tensor_parallel.one_rank", said, *folders],
        cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=1300,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    found = {}
    for rank in (0, 1):
        for line in map(json.loads, Path(f"{said}{rank}").read_text().splitlines()):
            found.setdefault(line.pop("test"), ([], []))[rank].append(line)
    return found


def test_generate_decodes_as_without_drafts(found):
    first, second = found["generate"]
    assert first == second  # also where each process would have drawn a seed of its own
    assert len(first) == 6 + len(TYPES) - 1 and {line["where"][0] for line in first} == set(TYPES)
    wrong = [line for line in first if not (line["is_same"] and line["is_sampled_same"])]
    assert not wrong


def test_engines_serve_the_same_requests_at_the_same_time(found):
    (first,), (second,) = found["engine"]
    assert first == second
    assert first["found"] == first["turns"] == first["alone"] and first["accepted"] > 0
    assert first["gave_way"] > 0
    assert first["reason"] == "cancelled"  # by the first process alone


def test_what_fails_in_the_first_process_ends_in_all(found):
    (first,), (second,) = found["failure"]
    assert first["error"] == "ZeroDivisionError: on purpose"
    assert second["error"].startswith("RankFailedError") and "its log" in second["error"]
    assert found["after"][0] == found["after"][1]


@pytest.mark.parametrize(
    "name, message", [("sharded draft", "without `tp_plan`"), ("time", "max_time"), ("rejection", "several processes")]
)
def test_what_processes_could_not_agree_on_is_refused(found, name, message):
    (first,), (second,) = found[name]
    assert first == second and first["error"].startswith("ValueError") and message in first["error"]


def test_an_engine_cannot_be_paused(found):
    (first,), (second,) = found["pause"]
    assert first == second and "cannot be paused" in first["error"]
