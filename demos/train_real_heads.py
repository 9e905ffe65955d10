"""Train a drafter for a model that people use, SmolLM2-135M-Instruct, on its own answers: EAGLE-3's heads or blocks.

    python demos/train_real_heads.py --data DATA --output heads --blocks 2
    python demos/train_real_heads.py --data DATA --output better-heads --blocks 2 4 --draft heads
    python demos/train_real_heads.py --data DATA --output drafter --kind dflash

`DATA` holds the files named in `training/corpus.py`. Questions are made of them in a fixed random order (see
`training/questions.py`) and answered in blocks, by `smartspec generate`; `smartspec train` learns from the answers of
the blocks, and the drafter drafts for questions that were held out. The command continues where it was interrupted.
The defaults are those of `models/smollm2-eagle3` as far as epochs allow; `--device cuda --blocks 16` takes the most
questions.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import hf_smartspec
from hf_smartspec.commands.common.models import encode, load_model, load_tokenizer
from hf_smartspec.commands.common.outputs import replace_json
from hf_smartspec.commands.common.real_model import real_model
from hf_smartspec.commands.main import main as smartspec
from training.corpus import load_corpus
from training.questions import pick_questions

BLOCK = 1000  # questions that are answered together
MAX_NEW_TOKENS = 320
ANSWERING = ["--keep", "id", "--keep", "category", "--keep", "prompt"]
ANSWERING += ["--temperature", "0", "--assistant", "none"]
TRAINING = ["--draft-vocab-size", "7168", "--max-length", "512", "--learning-rate", "1.5e-3"]
ROWS = {"cpu": ("32", "2"), "cuda": ("512", "64")}  # that are answered and trained on together
KINDS = {"eagle3": ["--num-heads", "5"], "dflash": ["--num-layers", "3"], "dspark": ["--num-layers", "3"]}
HELD_OUT, HELD_OUT_TOKENS, NUM_NODES = 6, 96, 5  # questions of a kind, tokens of an answer, tokens of a draft


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with the .jsonl or .jsonl.gz files")
    parser.add_argument("--target", help="folder or hub id of the model (default: the one that `make setup` fetches)")
    parser.add_argument("--kind", choices=KINDS, default="eagle3", help="of drafter")
    parser.add_argument("--output", type=Path, required=True, help="gets the drafter and its checkpoints")
    parser.add_argument("--draft", help="drafter to begin as, trained on other blocks")
    parser.add_argument(
        "--blocks",
        type=int,
        nargs="+",
        default=[4],
        metavar="N",
        help="train on the first N, or on blocks M to N - 1; 0: measure",
    )
    parser.add_argument("--device", default="cpu", choices=list(ROWS), help="of answering and training")
    parser.add_argument("--epochs", default="4", help="passes over the answers")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument(
        "--work", type=Path, default=Path.home() / ".cache/hf-smartspec/heads", help="gets questions and answers"
    )
    args = parser.parse_args(argv)
    if len(args.blocks) > 2:
        parser.error("--blocks takes one or two numbers")
    args.target = args.target or real_model()
    if args.target is None:
        parser.error("the model is not here: run `make setup`, or name another --target")
    return args


def answer(args: argparse.Namespace, questions: list[dict], block: int) -> Path:
    """Return the file of a block's answers, after writing what of it is missing."""
    folder: Path = args.work / Path(args.target).name
    folder.mkdir(parents=True, exist_ok=True)
    asked, answers = folder / f"questions-{block:02}.jsonl", folder / f"answers-{block:02}.jsonl"
    rows = questions[block * BLOCK : (block + 1) * BLOCK]
    asked.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    call = ["generate", "--model", args.target, "--dtype", args.dtype, "--device", args.device, *ANSWERING]
    call += ["--max-batch-size", ROWS[args.device][0]]
    run([*call, "--max-new-tokens", str(MAX_NEW_TOKENS), "--dataset", str(asked), "--output", str(answers)])
    return answers


def train(args: argparse.Namespace, answers: list[Path]) -> None:
    call = ["train", args.target, *map(str, answers), "--kind", args.kind, *TRAINING, *KINDS[args.kind]]
    call += ["--epochs", args.epochs, "--dtype", args.dtype, "--output", str(args.output)]
    call += ["--device", args.device, "--batch-size", ROWS[args.device][1]]
    call += ["--draft", args.draft] if args.draft else []
    run([*call, "--resume"] if (args.output / "checkpoints").exists() else call)


def run(arguments: list[str]) -> None:
    """Run a command of smartspec; raises `SystemExit` if it fails or is interrupted."""
    if status := smartspec(arguments):
        raise SystemExit(status)


def measure(args: argparse.Namespace, questions: list[dict]) -> dict[str, float]:
    """
    Return the mean number of tokens per step by kind of held-out question and in all, where every step verifies a
    chain of `NUM_NODES` drafted tokens: accepted tokens and the target's own.
    """
    model = load_model(args.target, args.dtype, "cpu")
    tokenizer: Any = load_tokenizer(args.target)
    drafts = hf_smartspec.SmartSpecConfig(str(args.output), num_nodes=NUM_NODES, width=1)
    options = {"assistant": drafts, "do_sample": False, "max_new_tokens": HELD_OUT_TOKENS}
    options |= {"pad_token_id": tokenizer.eos_token_id, "return_dict_in_generate": True}
    asked: dict[str, list[str]] = {}
    for row in questions:
        asked.setdefault(row["category"], []).append(row["prompt"])
    counts = {}
    for kind, prompts in asked.items():
        num_tokens = num_steps = 0
        for ids in encode(prompts[:HELD_OUT], tokenizer, MAX_NEW_TOKENS * 2):
            with hf_smartspec.enabled(model):
                output = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), **options)
            found = output.statistics
            num_tokens, num_steps = num_tokens + found.generated_tokens, num_steps + found.steps
        counts[kind] = num_tokens, num_steps
    counts["all"] = tuple(map(sum, zip(*counts.values())))
    return {kind: num_tokens / num_steps for kind, (num_tokens, num_steps) in counts.items()}


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    corpus = load_corpus(args.data)
    questions = pick_questions(corpus.train)
    if answers := [answer(args, questions, block) for block in range(*args.blocks)]:
        train(args, answers)
    accepted = measure(args, pick_questions(corpus.heldout_by_file))
    replace_json(args.output / "accepted.json", accepted)
    print(f"Tokens per step, held-out questions, chains of {NUM_NODES}:")
    print(", ".join(f"{kind} {length:.2f}" for kind, length in accepted.items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
