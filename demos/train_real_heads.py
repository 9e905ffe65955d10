"""Train a drafter for a model that people use, SmolLM2-135M-Instruct, on its own answers: EAGLE-3's heads or blocks.

    python demos/train_real_heads.py --data DATA --output heads --blocks 2
    python demos/train_real_heads.py --data DATA --output better-heads --blocks 2 4 --draft heads
    python demos/train_real_heads.py --data DATA --output drafter --kind dflash

`DATA` holds the files named in `training/corpus.py`. Questions are made of them in a fixed random order (see
`training/questions.py`), with `--own-questions` also by the model itself, and answered in blocks, by `smartspec
generate`; `smartspec train` learns from the answers of the blocks, and the drafter drafts for questions that were held
out. The command continues where it was interrupted. For heads like those of `models/smollm2-eagle3`:

    python demos/train_real_heads.py --data DATA --output heads --device cuda --own-questions 14000 --blocks 22 \
        --minutes 4
"""

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import hf_smartspec
from hf_smartspec.commands.common.models import encode, load_model, load_tokenizer
from hf_smartspec.commands.common.outputs import replace_json
from hf_smartspec.commands.common.real_model import real_model
from hf_smartspec.commands.main import main as smartspec
from training.corpus import Example, load_corpus
from training.questions import MORE_TASKS, TASKS, pick_questions

BLOCK = 1000  # questions that are answered together
MAX_NEW_TOKENS = 320
ANSWERING = ["--keep", "id", "--keep", "category", "--keep", "prompt", "--temperature", "0"]
TEMPERATURES = ("0.7", "0.85", "1", "1")  # of equal parts of the questions that the model makes up
QUESTION_TOKENS = range(5, 200)  # of such a question, with the end of its turn
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
    parser.add_argument(
        "--own-questions", type=int, default=0, metavar="N",
        help="have the model begin N user's turns, and mix those that it ends with the other questions",
    )  # fmt: skip
    parser.add_argument("--device", default="cpu", choices=list(ROWS), help="of answering, training and measuring")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--epochs", default="4", help="passes over the answers")
    length.add_argument("--minutes", metavar="N", help="time of training, in place of epochs")
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
    args.work /= Path(args.target).name
    if args.own_questions:
        args.work /= f"own-{args.own_questions}"
    return args


def pick(args: argparse.Namespace, examples: Mapping[str, Sequence[Example]], held_out: list[dict]) -> list[dict]:
    """Return the questions to learn from, without those that are held out."""
    questions = pick_questions(examples, TASKS + MORE_TASKS)
    if args.own_questions:
        made_up = make_up(args)
        print(f"{len(made_up):,} questions that the model has made up")
        questions += [{"id": f"own-{n}", "category": "own", "prompt": text} for n, text in enumerate(made_up)]
        random.Random(0).shuffle(questions)
    known = {row["prompt"] for row in held_out}
    return [row for row in questions if row["prompt"] not in known]


def make_up(args: argparse.Namespace) -> list[str]:
    """Return questions that the model writes where a user's turn begins (as in Magpie, arXiv 2406.08464)."""
    tokenizer: Any = load_tokenizer(args.target)
    if tokenizer is None or not tokenizer.chat_template:
        raise SystemExit("--own-questions: the model has no chat template, by which a user's turn would begin")
    mark = "the question"
    turn = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False).partition(mark)[0]
    turn = turn.removeprefix(tokenizer.decode(tokenizer("").input_ids))  # raw text gets it, too
    found: dict[str, None] = {}  # each once, in order
    for seed, temperature in enumerate(TEMPERATURES):
        rows = [{"prompt": turn}] * len(range(seed, args.own_questions, len(TEMPERATURES)))
        if rows:
            sampling = ["--raw", "--temperature", temperature, "--seed", str(seed)]
            written = read(generate(args, f"turns-{seed}", rows, QUESTION_TOKENS.stop, sampling))
            ended = [row for row in written if row["finish_reason"] == "stop"]
            found |= {row["response"].strip(): None for row in ended if row["generated_tokens"] in QUESTION_TOKENS}
    return [question for question in found if question]


def answer(args: argparse.Namespace, questions: list[dict], block: int) -> Path:
    """Return the file of a block's answers, after writing what of it is missing."""
    rows = questions[block * BLOCK : (block + 1) * BLOCK]
    return generate(args, f"{block:02}", rows, MAX_NEW_TOKENS, ANSWERING)


def generate(
    args: argparse.Namespace, name: str, rows: list[dict], max_new_tokens: int, options: Sequence[str]
) -> Path:
    """Return the file of the model's responses to the prompts of some rows, after writing what of it is missing."""
    args.work.mkdir(parents=True, exist_ok=True)
    asked, answers = args.work / f"questions-{name}.jsonl", args.work / f"answers-{name}.jsonl"
    asked.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    call = ["generate", "--model", args.target, "--dtype", args.dtype, "--device", args.device, "--assistant", "none"]
    call += ["--max-batch-size", ROWS[args.device][0], "--max-new-tokens", str(max_new_tokens), *options]
    run([*call, "--dataset", str(asked), "--output", str(answers)])
    return answers


def read(path: Path) -> list[dict]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def train(args: argparse.Namespace, answers: list[Path]) -> None:
    call = ["train", args.target, *map(str, answers), "--kind", args.kind, *TRAINING, *KINDS[args.kind]]
    call += ["--minutes", args.minutes] if args.minutes else ["--epochs", args.epochs]
    call += ["--dtype", args.dtype, "--output", str(args.output)]
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
    model = load_model(args.target, args.dtype, args.device)
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
                prompt = torch.tensor([ids], device=args.device)
                output = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
            found = output.statistics
            num_tokens, num_steps = num_tokens + found.generated_tokens, num_steps + found.steps
        counts[kind] = num_tokens, num_steps
    counts["all"] = tuple(map(sum, zip(*counts.values())))
    return {kind: num_tokens / num_steps for kind, (num_tokens, num_steps) in counts.items()}


def add_to_card(folder: Path, accepted: dict[str, float]) -> None:
    """Add what was measured to the card that `smartspec train` has written."""
    lines = [
        f"Tokens per step on questions that were held out, up to {HELD_OUT} of each kind, in chains of {NUM_NODES}:",
        "",
        f"| {' | '.join(accepted)} |",
        "|---" * len(accepted) + "|",
        f"| {' | '.join(f'{length:.2f}' for length in accepted.values())} |",
    ]
    with (folder / "README.md").open("a", encoding="utf-8") as card:
        card.write("\n## Tokens per step\n\n" + "\n".join(lines) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    corpus = load_corpus(args.data)
    held_out = pick_questions(corpus.heldout_by_file)
    if blocks := range(*args.blocks):
        questions = pick(args, corpus.train, held_out)
        train(args, [answer(args, questions, block) for block in blocks])
    accepted = measure(args, held_out)
    if blocks:
        replace_json(args.output / "accepted.json", accepted)
        add_to_card(args.output, accepted)
    print(f"Tokens per step, held-out questions, chains of {NUM_NODES}:")
    print(", ".join(f"{kind} {length:.2f}" for kind, length in accepted.items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
