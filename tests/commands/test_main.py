"""The `smartspec` command: what it accepts, what it refuses, and how it ends."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from hf_smartspec import SeededGumbelLogitsProcessor, __version__
from hf_smartspec.commands import main as cli
from hf_smartspec.commands.verify import command as verify
from hf_smartspec.decoding.verify import advance
from hf_smartspec.target_model.cache.slot_cache import SlotCache
from hf_smartspec.target_model.forward.packed import PackedForward
from hf_smartspec.training.medusa import MedusaTraining

from ..covering import IS_EXHAUSTIVE, exhaustive
from .helpers import call, check_imports

SHORT = ["--num-prompts", "3", "--batch-sizes", "3", "--max-new-tokens", "12", "--samples", "0", "--threads", "1"]


def run_verify(folder, *arguments):
    return call("verify", folder / "target", "--assistant", folder / "draft", *SHORT, *arguments)


# --- Help and refusals


def test_help_names_every_command_and_imports_none(capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(importlib, "import_module", None)
        assert call("--help") == 0
        out = capsys.readouterr().out
        assert "verify" in out and "bench" in out
        assert call("bench", "--help") == 0
        out = capsys.readouterr().out
        assert "load" in out and "python -m benchmarks NAME" in out and "overhead" in out


def test_version(capsys):
    assert call("--version") == 0
    assert capsys.readouterr().out == f"smartspec {__version__}\n"


WITHOUT_RESULTS = {("completion",), ("demo",), ("serve",), ("transformers",)}


def test_help_and_refusals_of_every_command_import_neither_torch_nor_transformers():
    check_imports("from hf_smartspec.commands.main import COMMANDS, main", "COMMANDS")


def test_arguments_offer_what_commands_know():
    """What commands know is built of what takes seconds to import; what their arguments offer is written out."""
    from hf_smartspec.candidates.combined.tuned import TUNABLE
    from hf_smartspec.commands.common import drafters, names
    from hf_smartspec.commands.common.arguments import DTYPES, QUANTIZATIONS
    from hf_smartspec.commands.load import arguments as load
    from hf_smartspec.commands.load.policies import Policies
    from hf_smartspec.commands.replay.sources import SOURCES
    from hf_smartspec.commands.train.kinds import KINDS
    from hf_smartspec.cpu import quantized
    from hf_smartspec.goodput import CostModel
    from hf_smartspec.goodput.papers.policies import BatchLookupTable
    from hf_smartspec.replicas.routing import ROUTERS

    known = {
        "tune": TUNABLE,
        "replay": SOURCES,
        "train": KINDS,
        "serve": ROUTERS,
    }
    for command, items in known.items():
        arguments = importlib.import_module(f"hf_smartspec.commands.{command}.arguments")
        assert tuple(items) in vars(arguments).values(), command
    assert quantized.KINDS == QUANTIZATIONS
    assert tuple(drafters._MODEL_FREE) == names._MODEL_FREE
    assert [str(dtype).removeprefix("torch.") for dtype in quantized.model._DTYPES] == list(DTYPES)
    policies = Policies(CostModel(0.0, 1.0, 1.0), BatchLookupTable({1: 1}))
    for name in set(load.NAMES) - {load.ORACLE, "k=NUMBER"}:
        policies.new(load.policy_name(name))


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help_and_writes_json(command, capsys):
    assert call(*command, "--help") == 0
    out = capsys.readouterr().out
    assert " ".join(command) in out and (" --json FILE" in out or command in WITHOUT_RESULTS)


def test_no_command_shows_help_and_fails(capsys):
    assert call() == 2
    assert "usage: smartspec" in capsys.readouterr().err


def test_help_begins_with_what_a_newcomer_needs_and_leaves_nothing_out():
    words = re.findall(r"^  (\w+)  ", cli.overview(), re.MULTILINE)
    assert words[:2] == ["generate", "chat"]
    assert sorted(words) == sorted({path[0] for path in cli.COMMANDS})
    assert max(map(len, cli.overview().splitlines())) <= 80


NEEDED = {
    ("verify",): "{target}",
    ("profile",): "{target}",
    ("train",): "{target} {prompts} --output {new}",
    ("tune",): "{prompts} --output {new}",
    ("replay",): "{prompts}",
    ("datastore", "build"): "{prompts} --tokenizer {target} --output {new}",
    ("generate",): "x",
}


@pytest.mark.parametrize("command", [path for path in cli.COMMANDS if path not in WITHOUT_RESULTS])
def test_results_that_cannot_be_written_are_refused_before_any_work(command, folder, tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    places = {"target": folder / "target", "prompts": tmp_path / "p.jsonl", "new": tmp_path / "new"}
    words = NEEDED.get(command, "").format(**places).split()
    assert call(*command, *words, "--json", "/no/such/folder/x.json") == 2
    err = capsys.readouterr().err
    assert "cannot write '/no/such/folder/x.json'" in err and "Traceback" not in err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "tcsh"])
def test_completion_knows_verbs_and_options(shell, capsys):
    assert call("completion", shell) == 0
    script = capsys.readouterr().out
    assert "generate" in script and "datastore" in script and "max-new-tokens" in script
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_completion_without_its_package_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert call("completion", "bash") == 2
    assert 'pip install "hf-smartspec[completion]"' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verfy"], "invalid choice: 'verfy', did you mean 'smartspec verify'?"),
        (["overhead"], "the bench 'overhead' is in the repository: python -m benchmarks overhead, in a checkout"),
        (["bench", "gpu", "--smoke"], "the bench 'gpu' is in the repository: python -m benchmarks gpu, in a checkout"),
        (["qqq"], "invalid choice: 'qqq' (see"),
        (["bench"], "required: COMMAND"),
        (["bench", "overhed"], "invalid choice: 'overhed', did you mean 'python -m benchmarks overhead'?"),
        (["verify"], "required: MODEL"),
        (["verify", "{target}", "--devcie", "cpu"], "unrecognized arguments: --devcie cpu; did you mean --device?"),
        (["verify", "{target}", "--num", "3"], "unrecognized arguments: --num"),  # no abbreviations
        (["verify", "{target}", "--dtype", "float23"], "invalid choice: 'float23'"),
        (["verify", "{target}", "--num-prompts", "0"], "must be at least 1, got 0"),
        (["verify", "{target}", "--batch-sizes", "1,x"], "'x' is no integer"),
        (["verify", "{target}", "--device", "gpu9"], "cannot use the device 'gpu9'"),
        (
            ["verify", "{target}", "--json", "/no/such/folder/file.json"],
            "cannot write '/no/such/folder/file.json': no such folder",
        ),
        (["verify", "{target}", "--prompts", "/no/prompts.txt"], "cannot read '/no/prompts.txt'"),
        (["verify", "{target}", "--max-new-tokens", "999"], "leave no room for a prompt"),
        (["verify", "{target}", "--assistant", "./no-such-draft"], "--assistant: no such model folder"),
        (["verify", "{bare}", "--prompts", "{prompts}"], "--prompts need a tokenizer"),
        (["verify", "./no-such-model"], "no such model folder: './no-such-model'"),
        (["verify", "{empty}"], "has no config.json"),
    ],
)
def test_bad_arguments_get_one_line_and_status_2(folder, tmp_path, arguments, message, capsys):
    (tmp_path / "prompts.txt").write_text("Hello\n")
    places = {
        "target": folder / "target",
        "bare": folder / "bare",
        "empty": tmp_path,
        "prompts": tmp_path / "prompts.txt",
    }
    assert call(*(argument.format(**places) for argument in arguments)) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.startswith("smartspec") and err.count("\n") == 1


def test_draft_of_another_vocabulary_is_refused(folder, tmp_path, capsys):
    config = json.loads((folder / "draft" / "config.json").read_text()) | {"vocab_size": 100}
    LlamaForCausalLM(LlamaConfig(**config)).save_pretrained(tmp_path / "other")
    assert call("verify", folder / "target", "--assistant", tmp_path / "other", *SHORT) == 2
    assert "vocabulary of 100 tokens" in capsys.readouterr().err


def test_ctrl_c_ends_with_one_line_and_status_130(folder, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(verify.Verifier, "run", interrupted)
    assert run_verify(folder) == 130
    captured = capsys.readouterr()
    assert captured.err == "smartspec: interrupted\n"


_VERSION = "from hf_smartspec.commands.main import main; raise SystemExit(main(['--version']))"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full is a device of Linux")
def test_output_on_a_full_disk_ends_with_one_line_and_status_1():
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", _VERSION], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "smartspec: error: cannot write: No space left on device\n")


def test_output_that_nobody_reads_ends_silently_with_status_1():
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        done = subprocess.run([sys.executable, "-c", _VERSION], stdout=pipe, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "")


def test_commands_run_where_standard_output_is_closed():
    code = """
from hf_smartspec.commands.common.console import make_console
from hf_smartspec.commands.main import guarded
raise SystemExit(guarded("x", lambda _: make_console().print("a line") or 3, []))
"""
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -c "$1" >&-', sys.executable, code], stderr=subprocess.PIPE, text=True
    )
    assert (done.returncode, done.stderr) == (3, "")


# --- verify


def test_verify_finds_nothing_wrong_and_says_what_it_compared(folder, tmp_path, capsys):
    file = tmp_path / "report.json"
    assert run_verify(folder, "--batch-sizes", "1,3", "--samples", "40", "--json", file) == 0
    out = capsys.readouterr().out
    assert "Lossless: the same tokens in every comparison." in out
    assert max(map(len, out.splitlines())) <= 100
    report = json.loads(file.read_text())
    assert report["is_lossless"] and report["failures"] == [] and report["warnings"] == []
    assert {check["drafts"] for check in report["tokens"]} == {
        "draft chain", "draft tree", "replayed chain", "replayed tree",
    }  # fmt: skip
    assert {(check["decoding"], check["batch_size"]) for check in report["tokens"]} == {
        ("greedy", 1), ("greedy", 3), ("sampled", 1), ("sampled", 3),
    }  # fmt: skip
    for check in report["tokens"]:
        statistics = check["statistics"]
        assert 0 < statistics["accepted_tokens"] < statistics["drafted_tokens"], check
        assert check["num_tokens"] == statistics["generated_tokens"]
    assert all(check["logits"] < 1e-4 and check["scores"] < 1e-4 for check in report["scores"])
    assert [check["num_samples"] for check in report["frequencies"]] == [40] * 4


@pytest.mark.parametrize(("dtype", "kind"), [("bfloat16", None), ("float32", None), ("bfloat16", "int4")])
def test_verify_against_alone_leaves_plain_generate_out(folder, tmp_path, dtype, kind, monkeypatch, capsys):
    monkeypatch.setattr(verify, "decode_plainly", None)
    file = tmp_path / "report.json"
    options = ["--against", "alone", "--dtype", dtype, "--batch-sizes", "1,3", "--samples", "40", "--json", file]
    options += ["--quantize", kind] if kind else []
    assert call("verify", folder / "target", *SHORT, *options) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "each prompt alone" in out and "against plain generate" not in out
    report = json.loads(file.read_text())
    assert not report["tokens"] and not report["scores"] and report["frequencies"]
    assert report["environment"]["dtype"] == (f"{kind} and {dtype}" if kind else dtype)
    ways = {(check["decoding"], check["batch_size"]) for check in report["reproductions"]}
    assert ways == {(decoding, size) for decoding in ("greedy", "sampled") for size in (1, 3, 0)}
    assert all(check["statistics"]["accepted_tokens"] for check in report["reproductions"] if check["drafts"][0] == "r")
    if report["must_reproduce"]:  # on CPUs whose products of any number of tokens are compiled
        assert "Lossless: the same tokens with and without speculation" in out and report["is_lossless"]
        assert not any(check["num_differing"] for check in report["reproductions"])


def test_verify_without_tokenizer_and_assistant(folder, capsys):
    assert call("verify", folder / "bare", *SHORT) == 0
    out = " ".join(capsys.readouterr().out.split())  # lines break where the folder's name is long
    assert "random token ids" in out and "assistant auto" in out


def test_verify_takes_what_generate_takes(folder, tmp_path, capsys):
    store, heads = tmp_path / "texts.sssd", tmp_path / "heads"
    (tmp_path / "texts.jsonl").write_text('{"prompt": "a", "response": "The capital of France"}\n')
    tokenizer = ["--tokenizer", folder / "target", "--output", store]
    assert call("datastore", "build", tmp_path / "texts.jsonl", *tokenizer) == 0
    model = LlamaForCausalLM.from_pretrained(folder / "target")
    MedusaTraining(model, 2).heads.save_pretrained(heads, base_model_name_or_path="target")
    few = [*SHORT, "--max-new-tokens", "6", "--batch-sizes", "3"]
    others = ["early_exit:1", f"suffix+{folder / 'draft'}", "auto", "suffix", "none"]
    for name in [f"datastore:{store}", heads, *others * IS_EXHAUSTIVE]:
        assert call("verify", folder / "target", *few, "--assistant", name) == 0, name
        assert "Lossless: the same tokens in every comparison." in capsys.readouterr().out, name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sufix", "Unknown `assistant` preset 'sufix': did you mean 'suffix'?"),
        ("suffix+./nope", "no such model folder: './nope'"),
        ("early_exit:9", "`num_layers` of LlamaForCausalLM"),
    ],
)
def test_verify_refuses_what_generate_refuses(folder, name, message, capsys):
    assert call("verify", folder / "target", *SHORT, "--assistant", name) == 2
    err = capsys.readouterr().err
    assert "--assistant: " in err and message in err


@pytest.mark.parametrize("name", ["prompts.jsonl", *exhaustive(["prompts.txt"])])
def test_verify_takes_prompts_from_a_file(folder, tmp_path, name, capsys):
    lines = ["The first prompt", "another"]
    rows = lines if name.endswith(".txt") else [json.dumps({"prompt": line, "id": 1}) for line in lines]
    (tmp_path / name).write_text("\n".join(rows) + "\n")
    assert call("verify", folder / "target", *SHORT, "--prompts", tmp_path / name) == 0
    assert "2 prompts" in capsys.readouterr().out


@pytest.mark.parametrize(("dtype", "status"), [("bfloat16", 0), ("float32", 1)])
def test_small_error_is_a_tie_in_half_precision_only(folder, tmp_path, dtype, status, monkeypatch, capsys):
    model = LlamaForCausalLM.from_pretrained(folder / "target")
    model.lm_head.weight.data[1::2] = model.lm_head.weight.data[::2]  # tokens in pairs of equal logits
    model.save_pretrained(tmp_path / "pairs")
    run = PackedForward._run

    def run_with_error(*args):
        logits = run(*args).float()
        logits[:, 1::2] += 0.005
        return logits

    monkeypatch.setattr(PackedForward, "_run", run_with_error)
    file = tmp_path / "report.json"
    assert call("verify", tmp_path / "pairs", *SHORT, "--dtype", dtype, "--json", file) == status
    report = json.loads(file.read_text())
    differences = [item for check in report["tokens"] for item in check["differences"]]
    assert all(item["is_tie"] for item in differences) is (dtype == "bfloat16")
    greedy = [item for check in report["tokens"] if check["decoding"] == "greedy" for item in check["differences"]]
    assert {item["own_token"] - item["plain_token"] for item in greedy} == {1}
    assert {item["plain_gap"] for item in greedy} == {0.0}
    out = capsys.readouterr().out
    assert "First difference of a row" in out
    assert ("Lossless up to rounding" if dtype == "bfloat16" else "NOT lossless") in out


def wrong_pick(monkeypatch):
    monkeypatch.setattr(
        "hf_smartspec.decoding.verify.advance",
        lambda row, token: advance(row, 7 if row.num_generated == 5 else token),
    )


def wrong_keys(monkeypatch):
    commit = SlotCache.commit
    monkeypatch.setattr(
        SlotCache, "commit", lambda self, rows, paths: commit(self, rows, [[max(n - 1, 0) for n in p] for p in paths])
    )


def wrong_noise(monkeypatch):
    seed_of = SeededGumbelLogitsProcessor.seed_of
    monkeypatch.setattr(SeededGumbelLogitsProcessor, "seed_of", lambda self, row: seed_of(self, row) + 1)


@pytest.mark.parametrize("fault", [wrong_pick, *exhaustive([wrong_keys], [wrong_noise])])
def test_verify_finds_a_planted_fault(folder, tmp_path, fault, monkeypatch, capsys):
    fault(monkeypatch)
    file = tmp_path / "report.json"
    assert run_verify(folder, "--json", file) == 1
    out = capsys.readouterr().out
    assert "NOT lossless" in out and "First difference of a row" in out
    report = json.loads(file.read_text())
    assert report["failures"] and not report["is_lossless"]
    differences = [item for check in report["tokens"] for item in check["differences"]]
    assert not any(item["is_tie"] for item in differences)
    if fault is wrong_pick:
        assert {item["position"] for item in differences} == {5}
