"""Train a small T5 target and its draft on the texts of the demos' models, on a CPU in about an hour.

    python demos/train_encoders.py --data DATA --steps 4000 --draft-steps 2000

`DATA` holds the files named in `training/corpus.py`; held-out questions are not learnt. The target learns the
published answers, the draft what the target thinks of each of their tokens. The tokenizer is that of the demos' target,
without its chat template: the encoder reads the question as it is. A run that was interrupted goes on from its last
checkpoint.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import kl_div
from transformers import (
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.trainer_utils import get_last_checkpoint

from train_models import copy_embeddings, load_model
from training.corpus import SOURCES, Example, load_corpus

HERE = Path(__file__).resolve().parent
MULTIPLE = 64  # lengths are padded to it: kernels are compiled anew for each shape
Row = dict[str, list[int]]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with the .jsonl or .jsonl.gz files")
    parser.add_argument(
        "--decoder", type=Path, default=HERE / "models/target",
        help="whose vocabulary is used; embeddings begin as the main directions of its own",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, default=HERE / "models", help="gets t5_target/ and t5_draft/")
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache/hf_smartspec/encoders", help="checkpoints")
    parser.add_argument("--steps", type=int, default=4000, help="of the target; one is a batch")
    parser.add_argument("--draft-steps", type=int, default=2000, help="of the draft")
    shape = parser.add_argument_group("shape: hidden size, layers on each side, heads, neurons")
    shape.add_argument("--target-shape", type=int, nargs=4, default=(256, 3, 4, 512), metavar="N", help="the target's")
    shape.add_argument("--draft-shape", type=int, nargs=4, default=(128, 1, 2, 256), metavar="N", help="the draft's")
    parser.add_argument("--max-prompt", type=int, default=256, help="longer questions are left out, in tokens")
    parser.add_argument("--max-answer", type=int, default=96, help="longer answers are cut, in tokens")
    parser.add_argument("--batch-size", type=int, default=16, help="texts of a step")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="the highest")
    parser.add_argument("--threads", type=int, help="CPU threads (torch's choice if not given)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and order of the texts")
    return parser.parse_args(argv)


def encode(example: Example, tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace) -> Row | None:
    """A single question and its answer; None for conversations, and for questions that are too long."""
    if len(example.messages) != 2:
        return None
    prompt, answer = (
        tokenizer(text, add_special_tokens=False, verbose=False).input_ids for _, text in example.messages
    )
    if not 0 < len(prompt) <= args.max_prompt:
        return None
    return {"input_ids": prompt, "labels": [*answer, tokenizer.eos_token_id][: args.max_answer]}


def rows_of(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> list[Row]:
    """What is learnt, each text as often as its file says."""
    rows: list[Row] = []
    for name, examples in load_corpus(args.data).train.items():
        found = [row for item in examples if (row := encode(item, tokenizer, args))]
        whole, rest = divmod(SOURCES[name].repeat, 1)
        rows += found * int(whole) + found[: round(rest * len(found))]
    return rows


def make_model(
    shape: Sequence[int], tokenizer: PreTrainedTokenizerBase, decoder: PreTrainedModel
) -> T5ForConditionalGeneration:
    """A T5 1.1 with random weights, but for its embeddings, which are its output, too."""
    hidden, layers, heads, neurons = shape
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=hidden,
        d_kv=64,
        d_ff=neurons,
        num_layers=layers,
        num_heads=heads,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=True,
        dropout_rate=0.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
    )
    model = T5ForConditionalGeneration(config)
    copy_embeddings(decoder, model)
    embeddings = model.get_input_embeddings().weight
    embeddings.data /= embeddings.std()  # as T5's begin
    model.generation_config = GenerationConfig(
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
    )
    return model


class Distillation(Seq2SeqTrainer):
    """Learns the teacher's distribution of each token of the answers, by forward KL divergence."""

    teacher: PreTrainedModel

    def compute_loss(self, model: Any, inputs: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        kept = inputs["labels"] != -100
        with torch.no_grad():
            aim = self.teacher(**inputs).logits[kept].float().log_softmax(-1)
        scores = model(**inputs).logits[kept].float().log_softmax(-1)
        return kl_div(scores, aim, log_target=True, reduction="batchmean")


def train(
    name: str, model: PreTrainedModel, rows: list[Row], tokenizer: Any, args: argparse.Namespace, teacher: Any = None
) -> None:
    """Trains within its number of steps, and saves in bfloat16."""
    folder = args.work / name
    options = Seq2SeqTrainingArguments(
        output_dir=str(folder),
        max_steps=args.steps if teacher is None else args.draft_steps,
        per_device_train_batch_size=args.batch_size,
        learning_rate=args.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=100,
        weight_decay=0.01,
        bf16="AVX512" in torch.backends.cpu.get_cpu_capability(),  # elsewhere it takes ten times as long as float32
        use_cpu=True,
        train_sampling_strategy="group_by_length",
        remove_unused_columns=False,
        save_steps=200,
        save_total_limit=1,
        logging_steps=50,
        report_to="none",
        seed=args.seed,
    )
    collator = DataCollatorForSeq2Seq(tokenizer, model=model, pad_to_multiple_of=MULTIPLE)
    kind = Seq2SeqTrainer if teacher is None else Distillation
    trainer = kind(model=model, args=options, train_dataset=rows, data_collator=collator)
    if teacher is not None:
        trainer.teacher = teacher
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)) if folder.is_dir() else None)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    model.to(torch.bfloat16).save_pretrained(args.output / name)
    tokenizer.save_pretrained(args.output / name)
    print(f"{name}: {model.num_parameters():,} parameters, {options.max_steps} steps, loss {json.dumps(losses[-1:])}")


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.decoder)
    tokenizer.chat_template, tokenizer.padding_side = None, "right"
    rows = rows_of(args, tokenizer)
    torch.manual_seed(args.seed)
    decoder = load_model(args.decoder, "cpu")
    target, draft = (make_model(shape, tokenizer, decoder) for shape in (args.target_shape, args.draft_shape))
    if not (args.output / "t5_target").exists():
        train("t5_target", target, rows, tokenizer, args)
    teacher = T5ForConditionalGeneration.from_pretrained(args.output / "t5_target").eval().requires_grad_(False)
    train("t5_draft", draft, rows, tokenizer, args, teacher)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
