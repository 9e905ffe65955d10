"""Train the small target and draft models of the demos from JSON-lines text files, on a CPU in about an hour.

    python demos/train_models.py --data DATA --target-minutes 50 --draft-minutes 20

`DATA` holds the files named in `training/corpus.py` (`gsm8k.jsonl.gz`, ...); those that are missing are left out. The
stages run in order and can be chosen with `--stages`:

    tokenizer   a byte-level BPE vocabulary with a chat template
    target      a Llama-architecture model of 14.6 M parameters, trained on the texts
    draft       one a tenth of that size, distilled from the target
    prompts     held-out prompts for the demo
    evaluate    held-out losses, and how often the draft's first guess is the target's token; writes results.json

Training goes on from its last checkpoint in `--work` after a Ctrl-C or a crash; a finished model is not trained again
unless its checkpoint is deleted or the budget is raised. Two settings of the environment help on Linux:
`OMP_WAIT_POLICY=passive` where other programs run on the same cores (threads then sleep instead of spinning: several
times the speed), and `MALLOC_MMAP_THRESHOLD_=8000000000 MALLOC_TRIM_THRESHOLD_=16000000000`, which keep memory
between steps (about a tenth).

A small hybrid, of whose layers three in four keep a state in place of keys and values, is distilled from the embedded
target and has its tokenizer, so that the embedded draft model drafts for it. In an hour on one core it learns SQL and
code rather than chat, and held-out prompts are written by category:

    python demos/train_models.py --data DATA --stages tokenizer target prompts --kind qwen3_5 \
        --teacher demos/models/target --target-shape 384 4 6 2 896 --block 384 --target-batch-tokens 1024 \
        --target-lr 2e-3 --target-minutes 65 --output HYBRID --work HYBRID/work --prompts HYBRID --num-prompts 16 \
        --repeat text_to_sql_advising=0 mbpp=5 humaneval=5 gsm8k=0.5 instruct_en_oasst1_val=0.5 \
        instruct_en_oa_models=0.2 instruct_en_medquad=0.05 multilingual_tldr=0.2
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from training.batches import Mix
from training.corpus import SOURCES, Corpus, load_corpus
from training.evaluate import first_token_acceptance
from training.loop import (
    Progress,
    TrainConfig,
    distillation_loss,
    heldout_losses,
    next_token_loss,
    train,
)
from training.prompts import pick_prompts, write_prompts
from training.tokenizer import Encoded, encode, train_tokenizer

STAGES = ("tokenizer", "target", "draft", "prompts", "evaluate")
HERE = Path(__file__).resolve().parent
KINDS = ("llama", "qwen3_5")
EVAL_ROWS = 24  # rows per category in the reports while training


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with the .jsonl or .jsonl.gz files")
    parser.add_argument("--output", type=Path, default=HERE / "models", help="gets target/, draft/, results.json")
    parser.add_argument(
        "--prompts", type=Path, default=HERE / "prompts.jsonl", metavar="FILE_OR_FOLDER",
        help="where the demo prompts go; a folder gets a file for each category",
    )  # fmt: skip
    parser.add_argument("--num-prompts", type=int, default=6, help="prompts per category in it")
    parser.add_argument(
        "--work", type=Path, default=Path.home() / ".cache/hf_smartspec/training", help="checkpoints and tokenizer"
    )
    parser.add_argument(
        "--continue-saved", action="store_true", help="start from the models in OUTPUT, not from random weights"
    )
    parser.add_argument(
        "--teacher", type=Path, metavar="MODEL",
        help="distil the target from this model, beginning with its embeddings, and take its tokenizer",
    )  # fmt: skip
    parser.add_argument(
        "--repeat", nargs="+", type=file_and_repeat, default=[], metavar="FILE=TIMES",
        help="how often rows of some files come up in a pass, in place of the usual number, such as gsm8k=0.5",
    )  # fmt: skip
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES, help="what to run", metavar="STAGE")
    budget = parser.add_argument_group("budget, shared by all runs that resume one another")
    budget.add_argument("--target-minutes", type=float, default=50, help="learning rate decays over this time")
    budget.add_argument("--draft-minutes", type=float, default=20, help="the same for the draft")
    budget.add_argument("--target-steps", type=int, help="stop earlier, after this many steps")
    budget.add_argument("--draft-steps", type=int, help="stop earlier, after this many steps")
    budget.add_argument("--checkpoint-minutes", type=float, default=4, help="time between checkpoints")
    budget.add_argument("--eval-minutes", type=float, default=6, help="time between reports of held-out loss")
    shape = parser.add_argument_group("shape")
    shape.add_argument("--vocab-size", type=int, default=8192, help="entries of the vocabulary")
    shape.add_argument("--kind", choices=KINDS, default="llama", help="architecture of the target")
    shape.add_argument(
        "--target-shape", type=int, nargs=5, default=(384, 8, 6, 2, 896), metavar="N",
        help="hidden size, layers, heads, key-value heads, intermediate size",
    )  # fmt: skip
    shape.add_argument("--draft-shape", type=int, nargs=5, default=(128, 2, 4, 2, 384), metavar="N", help="the same")
    shape.add_argument("--max-positions", type=int, default=2048, help="positions the models accept")
    shape.add_argument("--block", type=int, default=768, help="longest row that is trained on, in tokens")
    tuning = parser.add_argument_group("tuning")
    tuning.add_argument("--target-lr", type=float, default=1.5e-3, help="peak learning rate")
    tuning.add_argument("--draft-lr", type=float, default=3e-3, help="peak learning rate")
    tuning.add_argument("--target-batch-tokens", type=int, default=3072, help="tokens in a batch; two make a step")
    tuning.add_argument("--draft-batch-tokens", type=int, default=1024, help="the same for the draft")
    tuning.add_argument("--precision", choices=("autocast", "fp32"), default="autocast", help="bfloat16 or float32")
    tuning.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="torch device")
    tuning.add_argument("--threads", type=int, help="CPU threads (torch's choice if not given)")
    tuning.add_argument("--eval-prompts", type=int, default=64, help="prompts per category in `evaluate`")
    tuning.add_argument("--seed", type=int, default=0, help="of weights and order of the texts")
    return parser.parse_args(argv)


class Run:
    """The stages of one command; each reads what earlier ones left on disk."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.corpus = load_corpus(args.data)

    def tokenizer(self) -> None:
        path = self.args.work / "tokenizer"
        saved = self.args.output / "target" if self.args.continue_saved else self.args.teacher
        if path.exists():
            if saved and self.load_tokenizer().get_vocab() != load_vocab(saved):
                raise ValueError(f"{path} is not the tokenizer of {saved}: give another `--work`")
            print(f"{path} exists: kept, because checkpoints depend on it")
            return
        if saved:
            AutoTokenizer.from_pretrained(saved).save_pretrained(path)
            return
        texts = [
            content
            for examples in self.corpus.train.values()
            for example in examples
            for _, content in example.messages[-2:]
        ]
        train_tokenizer(texts, self.args.vocab_size, self.args.max_positions).save_pretrained(path)

    def target(self) -> None:
        tokenizer = self.load_tokenizer()
        torch.manual_seed(self.args.seed)
        if self.args.teacher:
            self.distil("target", self.args.teacher, tokenizer)
            return
        target = self.initial("target", tokenizer)
        self.train("target", target, lambda batch: next_token_loss(target, batch), tokenizer)

    def draft(self) -> None:
        torch.manual_seed(self.args.seed)
        self.distil("draft", self.args.output / "target", self.load_tokenizer())

    def distil(self, name: str, path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Train the student `name` to predict as the teacher at `path` does."""
        teacher = load_model(path, self.args.device)
        student = self.initial(name, tokenizer)
        if not self.args.continue_saved:
            (copy_parts if name == "target" else copy_embeddings)(teacher, student)
        self.train(name, student, lambda batch: distillation_loss(student, teacher, batch), tokenizer)

    def prompts(self) -> None:
        rows, path = pick_prompts(self.corpus, self.load_tokenizer(), self.args.num_prompts), self.args.prompts
        if path.suffix:
            write_prompts(rows, path)
        else:  # a folder
            path.mkdir(parents=True, exist_ok=True)
            for category in {row["category"] for row in rows}:
                write_prompts([row for row in rows if row["category"] == category], path / f"{category}.jsonl")
        print(f"{len(rows)} prompts written to {path}")

    def evaluate(self) -> None:
        tokenizer = self.load_tokenizer()
        encoded = self.encode_heldout(tokenizer)
        models = {name: load_model(self.args.output / name, self.args.device) for name in ("target", "draft")}
        results = {
            name: {
                "parameters": model.num_parameters(),
                **json.loads((self.args.work / f"{name}.json").read_text()),
                "heldout_loss": heldout_losses(model, encoded, tokenizer.pad_token_id, 200, "fp32"),
            }
            for name, model in models.items()
        }
        results["first_token_acceptance"] = first_token_acceptance(
            models["target"], models["draft"], tokenizer, self.corpus.heldout, max_prompts=self.args.eval_prompts
        )
        text = json.dumps(results, indent=2)
        (self.args.output / "results.json").write_text(text + "\n")
        print(text)

    def initial(self, name: str, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
        """The float32 model that training starts from, if there is no checkpoint."""
        if self.args.continue_saved:
            return load_model(self.args.output / name, self.args.device).float().train().requires_grad_(True)
        shape = getattr(self.args, f"{name}_shape")
        kind = self.args.kind if name == "target" else "llama"
        return make_model(tokenizer, kind, shape, self.args.max_positions).to(self.args.device)

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        path = self.args.work / "tokenizer"
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing: run the stage `tokenizer` first")
        return AutoTokenizer.from_pretrained(path)

    def encode_heldout(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[Encoded]]:
        return {
            category: [row for e in examples if (row := encode(e, tokenizer, self.args.block))]
            for category, examples in self.corpus.heldout.items()
        }

    def train(self, name: str, model: PreTrainedModel, loss_fn, tokenizer: PreTrainedTokenizerBase) -> None:
        """Train `model` within the budget of `name` and save it with its tokenizer."""
        args, corpus = self.args, self.corpus
        repeats = {file: source.repeat for file, source in SOURCES.items()} | dict(args.repeat)
        sources = [
            ([row for e in examples if (row := encode(e, tokenizer, args.block))], repeats[file])
            for file, examples in corpus.train.items()
        ]
        mix = Mix(sources, getattr(args, f"{name}_batch_tokens"), tokenizer.pad_token_id, args.seed)
        describe(corpus, sources, model)
        heldout = self.encode_heldout(tokenizer)
        config = TrainConfig(
            minutes=getattr(args, f"{name}_minutes"),
            steps=getattr(args, f"{name}_steps"),
            learning_rate=getattr(args, f"{name}_lr"),
            precision=args.precision,
            checkpoint_minutes=args.checkpoint_minutes,
            eval_minutes=args.eval_minutes,
        )

        def report() -> dict[str, float]:
            return heldout_losses(model, heldout, tokenizer.pad_token_id, EVAL_ROWS, args.precision)

        now = train(model, loss_fn, mix, report, args.work / f"{name}.pt", config)
        save_model(model, tokenizer, args.output / name)
        write_summary(now, mix, args.work / f"{name}.json")
        print(f"{name} saved; held-out loss {report()}")


def file_and_repeat(text: str) -> tuple[str, float]:
    """Return a file of `SOURCES` and the number after it, from `FILE=TIMES`."""
    file, _, times = text.partition("=")
    if file not in SOURCES or float(times) < 0:
        raise ValueError(text)
    return file, float(times)


def load_vocab(path: Path) -> dict[str, int]:
    return AutoTokenizer.from_pretrained(path).get_vocab()


def make_model(
    tokenizer: PreTrainedTokenizerBase, kind: str, shape: tuple[int, ...], max_positions: int
) -> PreTrainedModel:
    """A model with random weights and tied embeddings, whose generation is greedy by default."""
    hidden, layers, heads, kv_heads, intermediate = shape
    ids = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": True,
        **ids,
    }
    if kind == "llama":
        model: PreTrainedModel = LlamaForCausalLM(LlamaConfig(**sizes))
    else:
        from transformers import (
            Qwen3_5ForCausalLM,
            Qwen3_5TextConfig,
        )  # newer than the oldest release that is supported

        # Values as wide as the hidden states, and keys half as wide, as in the large models.
        head_dim = hidden // heads
        linear = {"linear_key_head_dim": head_dim, "linear_value_head_dim": head_dim}
        linear |= {"linear_num_key_heads": max(heads // 2, 1), "linear_num_value_heads": max(heads // 2, 1) * 2}
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes, **linear, head_dim=head_dim))
    model.generation_config = GenerationConfig(do_sample=False, **ids)
    return model


@torch.no_grad()
def copy_embeddings(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    """Start the draft from the main directions of the target's embeddings (all, where it is as wide): most of its
    parameters are embeddings, and distilling is too short to learn them from nothing."""
    weight = target.get_input_embeddings().weight.float()
    directions = torch.linalg.svd(weight, full_matrices=False).Vh[: draft.config.hidden_size]  # (hidden, target hidden)
    draft.get_input_embeddings().weight.copy_(weight @ directions.T)


@torch.no_grad()
def copy_parts(teacher: PreTrainedModel, student: PreTrainedModel) -> None:
    """
    Start a student as wide as the teacher from its embeddings, and from the MLPs and norms of layers that are evenly
    spread over it (as DistilBERT does), another one from the embeddings' main directions.
    """
    sizes = [(model.config.hidden_size, model.config.intermediate_size) for model in (teacher, student)]
    if sizes[0] != sizes[1]:
        copy_embeddings(teacher, student)
        return
    student.get_input_embeddings().load_state_dict(teacher.get_input_embeddings().state_dict())
    places = torch.linspace(0, len(teacher.model.layers) - 1, len(student.model.layers)).round().int().tolist()
    pairs = [(teacher.model.norm, student.model.norm)]
    for old, new in zip([teacher.model.layers[place] for place in places], student.model.layers, strict=True):
        new.mlp.load_state_dict(old.mlp.state_dict())
        pairs += [(getattr(old, name), getattr(new, name)) for name in ("input_layernorm", "post_attention_layernorm")]
    for old, new in pairs:
        new.weight.copy_(old.weight.float() + _norm_offset(teacher) - _norm_offset(student))


def _norm_offset(model: PreTrainedModel) -> int:
    """Return what the model's norms add to their weights before they multiply by them."""
    return 1 if model.config.model_type == "qwen3_5_text" else 0


def load_model(path: Path, device: str) -> PreTrainedModel:
    """The saved model, in bfloat16 as it will be used, for inference only."""
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: run the stage `{path.name}` first")
    return AutoModelForCausalLM.from_pretrained(path).to(device).eval().requires_grad_(False)


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    model.to(torch.bfloat16).save_pretrained(path)
    tokenizer.save_pretrained(path)


def describe(corpus: Corpus, sources: list[tuple[list[Encoded], float]], model: PreTrainedModel) -> None:
    print(f"{model.num_parameters():,} parameters; rows and tokens x times in a pass:")
    for file, (rows, repeat) in zip(corpus.train, sources, strict=True):
        print(f"  {file:26} {len(rows):6,} rows {sum(len(row.ids) for row in rows):10,} tokens x {repeat}")


def write_summary(now: Progress, mix: Mix, path: Path) -> None:
    passes = mix.pass_index + mix.batch_index / len(mix.plan)
    summary = {
        "steps": now.step,
        "tokens": now.tokens,
        "passes": round(passes, 2),
        "minutes": round(now.seconds / 60, 1),
        "tokens_per_second": round(now.tokens / max(now.seconds, 1e-9)),
    }
    path.write_text(json.dumps(summary))


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    run = Run(args)
    try:
        for stage in (stage for stage in STAGES if stage in args.stages):
            print(f"== {stage}", flush=True)
            getattr(run, stage)()
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
