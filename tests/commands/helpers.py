"""What tests of commands share."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from hf_smartspec.commands import main as cli
from hf_smartspec.commands.common import models

from ..candidates.heads.fitted import fitted_heads
from ..folders import byte_tokenizer

EMBEDDED = Path(__file__).parents[2] / "demos" / "models" / "target"


def call(*arguments):
    """Exit status of one command line."""
    try:
        return cli.main([str(argument) for argument in arguments])
    except SystemExit as error:
        return error.code


def check_imports(main: str, commands: str) -> None:
    """
    Check that help and refusals import neither torch nor transformers, in a new process, which has imported nothing.

    Args:
        main, commands: Code that imports `main`, and an expression of the words of each command.
    """
    script = f"""
import sys
{main}

for words in [[], ["--help"], ["typo"], *([*path, word] for path in {commands} for word in ("--help", "--typo"))]:
    try:
        status = main(words)
    except SystemExit as end:
        status = end.code
    assert status == (0 if "--help" in words else 2), words
    heavy = {{"torch", "transformers", "numba", "numpy"}} & sys.modules.keys()
    assert not heavy, (words, heavy)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]


def check_demo_is_needed(run, arguments: Sequence[str], needed: str, tmp_path: Path, monkeypatch, capsys) -> None:
    """Check that a command (`run`, of its words) says what to pass where the demo is missing."""
    monkeypatch.setattr(models, "_PARTS", ("no such file",))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    assert run(*(argument.format(file="data.jsonl") for argument in arguments)) == 2
    error = capsys.readouterr().err
    remedy = f"name {needed}, or call this in a checkout" if needed else "package: call this in a checkout"
    assert "come with the repository, not the package" in error and remedy in error and error.count("\n") == 1


def save_fitted_heads(folder: Path, prompts: Sequence[str], num_tokens: int = 12) -> Path:
    """`medusa`, of the `target` there: they know what it says behind these prompts, which are equally long."""
    target = AutoModelForCausalLM.from_pretrained(folder / "target")
    ids = byte_tokenizer()(list(prompts), return_tensors="pt")["input_ids"]
    texts = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, eos_token_id=None)
    fitted_heads(target, texts).save_pretrained(folder / "medusa")
    return folder / "medusa"
