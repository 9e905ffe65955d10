"""`smartspec train`: drafters for a target of yours, trained on texts or on the target's own answers."""

import argparse
import hashlib
import json
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...candidates.heads.files import CONFIG
from ...training.blocks import BlockTraining
from ...training.card import write_card
from ...training.checkpoints import newest_checkpoint
from ...training.loop import SAVE_SECONDS, Schedule, train
from ...training.texts import Text, split
from ..common.arguments import UsageError, usage_errors
from ..common.console import make_console, table
from ..common.models import check_device, check_folder, load_model
from ..common.outputs import check_output, replace_json, write_json
from ..common.recordings import Fields, Recording, Texts, answers, read_requests, tokenized, tokenizer_of
from .kinds import CHECKPOINTS, KINDS, check_draft

_HELD_OUT = 0.05  # share of texts
_SETTINGS = "settings.json"


def run(args: argparse.Namespace) -> int:
    check_device(args.device)
    check_folder(args.model)
    check_output(args.json)
    if args.draft is not None and args.kind == "medusa":
        raise UsageError("--draft: Medusa heads begin as the target's own head")
    check_output(args.answers)
    if args.answers and not args.own_outputs:
        raise UsageError("--answers goes with --own-outputs")
    known = _known_answers(_answers_path(args))
    _check_folder(args)
    tokenizer = tokenizer_of(args.model)
    requests = [item for path in args.files for item in read_requests(path, Fields(), args.limit, not args.own_outputs)]
    if len({tuple(item.context) for item in requests}) < 2:
        raise UsageError("there must be at least two different prompts, one of them to be held out")
    model = load_model(args.model, args.dtype, args.device)
    if model.config.is_encoder_decoder:
        raise UsageError(f"{args.model!r} has an encoder: heads are trained for decoders only")
    check_draft(args, model)
    (args.output / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
    write_json(args.output / CHECKPOINTS / _SETTINGS, _settings(args))
    texts = _texts(args, requests, tokenizer, model, known)
    with usage_errors():
        learnt, held_out = split(texts, _HELD_OUT, args.seed)
    console = make_console()
    kind = KINDS[args.kind]
    module: Any = kind.make(args, model, learnt)
    schedule = Schedule(
        args.epochs, args.steps, args.minutes, args.batch_size, args.max_length, args.learning_rate, args.seed
    )
    _train(module, learnt, args, schedule, console)
    accuracy = module.accuracy(held_out, args.max_length, args.batch_size)
    report = {"learnt": len(learnt), "held_out": len(held_out), "accuracy": accuracy}
    if isinstance(module, BlockTraining):
        report["accepted_length"] = module.accepted_length(held_out, args.max_length, args.batch_size)
    kind.save(module, args)  # in the target's dtype
    write_card(args.output, args.kind, args.model, accuracy, len(held_out), _facts(args, learnt))
    if args.json:
        write_json(args.json, report)
    _show(console, accuracy, len(held_out), kind.places)
    if isinstance(module, BlockTraining):
        console.print(f"Of a block, {report['accepted_length']:.2f} of {len(accuracy)} drafted tokens are accepted.")
    console.print(f"Use it as `assistant={str(args.output)!r}`.", style="bold", soft_wrap=True)
    return 0


def _train(module: Any, texts: Sequence[Text], args: argparse.Namespace, schedule: Schedule, console: Console) -> None:
    """Train, with --resume from the newest checkpoint on."""
    folder = args.output / CHECKPOINTS
    newest = newest_checkpoint(folder) if args.resume else None
    if newest is not None:
        console.print(f"Going on at step {newest.step:,} of {newest.num_steps:,}.")
    elif args.resume:
        console.print("There is no complete checkpoint yet: training begins.")
    try:
        train(module, texts, folder, schedule, newest)
    except KeyboardInterrupt:
        if (newest := newest_checkpoint(folder)) is not None:
            kept = f"Kept at step {newest.step:,} of {newest.num_steps:,}: --resume goes on there."
            console.print(kept)
        raise


def _facts(args: argparse.Namespace, texts: Sequence[Text]) -> dict[str, str]:
    """Return rows of the card: what was learnt, and how."""
    newest = newest_checkpoint(args.output / CHECKPOINTS)
    assert newest is not None, "one is written at the end"
    passes = newest.step * args.batch_size / len(texts)
    facts = {
        "texts": f"{len(texts):,}, with {sum(len(item.response) for item in texts):,} tokens of responses",
        "updates": f"{newest.step:,} of {args.batch_size} texts of up to {args.max_length} tokens: {passes:.2g} passes",
        "optimiser": f"AdamW, {args.learning_rate:g} with warm-up and cosine",
        "target": f"in {args.dtype}",
    }
    if args.kind == "eagle3":
        facts["tokens drafted one after another"] = str(args.num_heads)
    return facts


def _check_folder(args: argparse.Namespace) -> None:
    """Raise `UsageError` if the output folder holds another model, or checkpoints of a training with other settings."""
    folder, known = args.output, args.output / CHECKPOINTS / _SETTINGS
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--output: {str(folder)!r} is no folder")
    if (folder / CONFIG).exists() and not KINDS[args.kind].is_in(str(folder)):
        raise UsageError(f"--output: {str(folder)!r} holds another model")
    if not known.exists():
        return
    if not args.resume:
        raise UsageError(f"--output: {str(folder)!r} holds checkpoints: go on with --resume, or name another folder")
    others, own = json.loads(known.read_text()), _settings(args)
    if differing := [name for name in own if own[name] != str(others.get(name))]:
        before = ", ".join(f"{name} was {others.get(name)!r}" for name in differing)
        raise UsageError(f"--resume: the checkpoints in {str(folder)!r} are of another training: {before}")


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments that must not change when a training is resumed."""
    return {
        name: str(value)
        for name, value in vars(args).items()
        if name not in ("output", "resume", "device", "json", "answers")
    }


def _texts(
    args: argparse.Namespace,
    requests: Sequence[Texts],
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    known: dict[str, Any],
) -> list[Text]:
    """Return the texts to learn from as token ids; prompts are users' turns where there is a chat template."""
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    recordings = [
        item._replace(response=np.append(item.response, np.array(end, np.int64)))
        for item in tokenized([item for item in requests if not item.is_cut], tokenizer, args.max_length)
    ]
    recordings += tokenized([item for item in requests if item.is_cut], tokenizer, args.max_length)
    if args.own_outputs:
        recordings = _answers(args, recordings, tokenizer, model, known)
    return [Text(item.prompt, item.response) for item in recordings if len(item.response) > 1]


def _answers(
    args: argparse.Namespace,
    recordings: Sequence[Recording],
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    known: dict[str, Any],
) -> list[Recording]:
    """
    Return the target's own responses, and keep them for further trainings with the same prompts: about every minute,
    at the end, and at Ctrl-C, after which only the missing ones are computed.
    """
    # Targets that take turns in one folder differ in their first output weights.
    output: Any = model.get_output_embeddings()
    weights = output.weight[:64].detach().float().cpu().numpy().tobytes()
    asked = {
        "prompts": [item.prompt.tolist() for item in recordings],
        "most": args.own_outputs,
        "target": hashlib.sha256(weights).hexdigest(),
    }
    is_known = all(known.get(name) == value for name, value in asked.items())
    responses = list(known["responses"]) if is_known else []
    if len(responses) < len(recordings):
        saved = time.monotonic()
        try:
            with closing(answers(recordings[len(responses) :], model, args.own_outputs, "answering")) as found:
                for item in found:
                    responses.append(item.response.tolist())
                    if time.monotonic() - saved >= SAVE_SECONDS:
                        replace_json(_answers_path(args), asked | {"responses": responses})
                        saved = time.monotonic()
        finally:
            replace_json(_answers_path(args), asked | {"responses": responses})
    return [Recording(item.prompt, np.array(ids, np.int64)) for item, ids in zip(recordings, responses)]


def _answers_path(args: argparse.Namespace) -> Path:
    path: Path = args.answers or args.output / CHECKPOINTS / "answers.json"
    return path


def _known_answers(path: Path) -> dict[str, Any]:
    """Return the answers that an earlier training has kept; raises `UsageError` for any other file."""
    if not path.exists():
        return {}
    kinds = OSError, ValueError, LookupError, TypeError
    with usage_errors(f"--answers: {str(path)!r} holds no answers", *kinds, reason=repr):
        known: dict[str, Any] = json.loads(path.read_text())
        known["prompts"], known["responses"]
    return known


def _show(console: Console, accuracy: list[dict[int, float]], num_texts: int, places: str) -> None:
    lines = table(
        f"{num_texts} texts that were held out", "token of a draft", *(f"top {num}" for num in accuracy[0]), num_text=1
    )
    for head, shares in enumerate(accuracy, start=1):
        lines.add_row(f"{head} {places}", *(f"{share:.1%}" for share in shares.values()))
    console.print(lines)
