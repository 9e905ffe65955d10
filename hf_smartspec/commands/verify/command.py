"""`smartspec verify`: a check that speculation is lossless with your model and drafter on your machine."""

import argparse
import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ...cpu.quantized import is_quantized
from ...prepare.checks import check_assistant
from ...target_model.forward.rotary import lengthwise_modules
from ...target_model.written import written_decoder
from ..common.arguments import UsageError, usage_errors
from ..common.console import environment, make_console, track
from ..common.drafters import DrafterFiles
from ..common.exactness import Rounding, measure_rounding
from ..common.models import (
    PROMPTS,
    check_folder,
    dtype_to_load,
    encode,
    left_padded,
    load_model,
    load_tokenizer,
    random_prompts,
    read_prompts,
    use_machine,
    use_quantized,
)
from ..common.names import is_model, parts_of
from ..common.outputs import check_output, write_json
from ..common.runs import Decoding, decode_plainly, pad_id
from .comparison import Comparison, TokenCheck
from .drafts import ways_of_drafting
from .frequencies import check_frequencies, exact_table, ways_of_sampling
from .report import Report, print_report
from .reproduction import Reproducer

_SCORED_TOKENS = 16  # columns of scores that are compared: they are as wide as the vocabulary
_SAMPLED_PROMPT = 8  # tokens of the prompt whose continuations are counted: it is run once per sample


def run(args: argparse.Namespace) -> int:
    use_machine(args)
    check_output(args.json)
    texts = [row["prompt"] for row in read_prompts(args.prompts)] if args.prompts else list(PROMPTS)
    model = load_model(args.model, dtype_to_load(args.model, args.dtype, args.quantize), args.device)
    use_quantized(model, args.quantize, args.dtype)
    model.generation_config = _without_sampling(model)
    assistant = _load_assistant(args, model)
    tokenizer = load_tokenizer(args.model)
    prompts, source = _encoded_prompts(args, texts, model, tokenizer)
    verifier = Verifier(model, assistant, prompts, args.batch_sizes, args.max_new_tokens, args.seed)
    found = environment(model.device, model.dtype)
    if args.quantize:
        found["dtype"] = f"{args.quantize} and {found['dtype']}"
    report = Report(
        args.model,
        args.assistant,
        found,
        source,
        [len(prompt) for prompt in prompts],
        args.max_new_tokens,
        verifier.rounding() if args.against == "plain" else None,
    )
    try:
        with _collecting_warnings(report.warnings):
            if args.against == "alone":
                verifier.run_against_alone(report, args.samples)
            else:
                verifier.run(report, args.samples)
    except KeyboardInterrupt:
        report.warnings.append("interrupted: only the comparisons that are shown were made")
        raise
    finally:
        if report.tokens or report.reproductions:
            print_report(report, make_console(), tokenizer)
            if args.json:
                write_json(args.json, report.as_dict())
    return 1 if report.failures else 0


def _without_sampling(model: PreTrainedModel) -> GenerationConfig:
    """Return the model's generation config without its sampling options, which this command sets."""
    config = copy.deepcopy(model.generation_config)
    for name in "temperature top_k top_p top_h min_p typical_p epsilon_cutoff eta_cutoff num_beams max_length".split():
        setattr(config, name, None)
    config.do_sample = False
    config.pad_token_id = pad_id(model)
    return config


def _load_assistant(args: argparse.Namespace, model: PreTrainedModel) -> Any:
    """Return the value of `assistant=`: names of presets as they are, models and learned drafters loaded."""
    with usage_errors("--assistant", TypeError, ValueError, UsageError):
        for item in filter(is_model, parts_of(args.assistant)):
            check_folder(item)
        check_assistant(parts_of(args.assistant))
    return DrafterFiles(model, option="--assistant").named(args.assistant).assistant


def _encoded_prompts(
    args: argparse.Namespace, texts: list[str], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[list[list[int]], str]:
    config = model.config.get_text_config(decoder=True)
    max_len = getattr(config, "max_position_embeddings", None) or 2048
    max_len = min(max_len - args.max_new_tokens, 1024)
    if max_len < 1:
        raise UsageError(f"--max-new-tokens: {args.max_new_tokens} tokens leave no room for a prompt in this model")
    if tokenizer is None:
        if args.prompts:
            raise UsageError(f"--prompts need a tokenizer, and {args.model!r} has none")
        return random_prompts(args.num_prompts, config.vocab_size, max_len, args.seed), "random token ids"
    prompts = encode(texts[: args.num_prompts], tokenizer, max_len)
    if not prompts:
        raise UsageError(f"the tokenizer of {args.model!r} makes no tokens of the prompts")
    if any(token >= config.vocab_size for prompt in prompts for token in prompt):
        raise UsageError(f"the tokenizer of {args.model!r} has tokens beyond the model's {config.vocab_size}")
    return prompts, str(args.prompts) if args.prompts else "built-in prompts"


class Verifier:
    """
    All comparisons of one model.

    Args:
        model (`PreTrainedModel`): The target; its generation config must not sample.
        assistant: A value of `assistant=`.
        prompts (list of token ids): Prompts without padding.
        batch_sizes (sequence of `int`): Batch sizes; all prompts are decoded at each of them.
        max_new_tokens, seed (`int`): Of decoding, and of sampling.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        assistant: Any,
        prompts: list[list[int]],
        batch_sizes: Sequence[int],
        max_new_tokens: int,
        seed: int,
    ):
        self.model, self.assistant, self.prompts, self.seed = model, assistant, prompts, seed
        self.max_new_tokens = max_new_tokens
        self.batch_sizes = list(dict.fromkeys(min(size, len(prompts)) for size in batch_sizes))
        self.pad_id: int = model.generation_config.pad_token_id
        self.decodings = [Decoding(), Decoding(seed)]
        self.ways = ways_of_drafting(assistant, model.config.get_text_config(decoder=True).vocab_size)

    def run(self, report: Report, num_samples: int) -> None:
        """
        Fill in the report: tokens at every batch size, in half precision and quantized again, then scores, then
        frequencies.
        """
        num_checks = len(self.decodings) * len(self.ways) * (len(self.batch_sizes) + 1) + bool(num_samples)
        is_exact = self.model.dtype is torch.float32 and not is_quantized(self.model)
        reproducer = None if is_exact else self._reproducer()
        if reproducer is not None:
            num_checks += len(self.decodings) * len(reproducer.ways)
        with track(total=num_checks, desc="verifying") as progress:
            for size in self.batch_sizes:
                self.check_tokens(report, size, progress)
            if reproducer is not None:
                self.check_reproduction(report, reproducer, progress)
            self.check_scores(report, progress)
            if num_samples:
                self.check_frequencies(report, num_samples)
                progress.update()
        report.warnings += _idle_drafts(report)

    def run_against_alone(self, report: Report, num_samples: int) -> None:
        """
        Fill in the report: tokens of all ways of decoding, against those of each prompt alone and without drafts, then
        frequencies.
        """
        reproducer = self._reproducer()
        num_checks = len(self.decodings) * len(reproducer.ways) + bool(num_samples)
        with track(total=num_checks, desc="verifying") as progress:
            self.check_reproduction(report, reproducer, progress)
            if num_samples:
                self.check_frequencies(report, num_samples)
                progress.update()
        report.warnings += _idle_drafts(report)

    def rounding(self) -> Rounding:
        """Return the largest rounding of all decodings."""
        return max(self.roundings.values(), key=lambda item: item.measured)

    def _reproducer(self) -> Reproducer:
        return Reproducer(self.model, self.prompts, self.ways, self.batch_sizes, self.max_new_tokens)

    @cached_property
    def roundings(self) -> dict[str, Rounding]:
        """Rounding over the texts of each decoding, by its name: some tokens amplify it tenfold and more."""
        prompts = self.prompts[: max(self.batch_sizes)]
        inputs = left_padded(prompts, self.pad_id, self.model.device)
        num_tokens = min(self.max_new_tokens, _SCORED_TOKENS)
        found = {}
        for decoding in self.decodings:
            run = decode_plainly(self.model, inputs, decoding, num_tokens, records=True)
            assert run.logits is not None, "recorded"
            found[decoding.name] = measure_rounding(self.model, prompts, run.tokens, run.logits)
        return found

    def check_tokens(self, report: Report, batch_size: int, progress: Any) -> None:
        """Compare the tokens of all prompts, in batches of one size, for every way of drafting."""
        starts = range(0, len(self.prompts), batch_size)
        rows = [self.prompts[start : start + batch_size] for start in starts]
        batches = [left_padded(prompts, self.pad_id, self.model.device) for prompts in rows]
        for decoding in self.decodings:
            plain = [decode_plainly(self.model, inputs, decoding, self.max_new_tokens).tokens for inputs in batches]
            if decoding.seed is None:
                report.plain_tokens[batch_size] = [line for tokens in plain for line in tokens.tolist()]
            for drafting in self.ways:
                check, rounding = TokenCheck(decoding.name, drafting.name, batch_size), self.roundings[decoding.name]
                comparison = Comparison(self.model, decoding, self.max_new_tokens, drafting, rounding)
                for index, (inputs, tokens) in enumerate(zip(batches, plain)):
                    comparison.check_batch(inputs, tokens, check, checks_default_output=index == 0)
                report.tokens.append(check)
                progress.update()

    def check_reproduction(self, report: Report, reproducer: Reproducer, progress: Any) -> None:
        """Compare all ways of decoding with each prompt alone, without drafts; in float32, these have plain tokens."""
        try:
            for decoding in self.decodings:
                for found in reproducer.compare(decoding):
                    report.reproductions.append(found)
                    progress.update()
        finally:  # also of what was compared until an interruption
            decoder = written_decoder(self.model)  # asked last: a first use may have found it wrong
            is_lengthwise = bool(lengthwise_modules(self.model))  # prompts of a batch share their longest's embeddings
            report.must_reproduce = decoder is not None and decoder.is_reproducible and not is_lengthwise

    def check_scores(self, report: Report, progress: Any) -> None:
        """Compare returned logits and scores of one batch of the largest size."""
        inputs = left_padded(self.prompts[: max(self.batch_sizes)], self.pad_id, self.model.device)
        num_tokens = min(self.max_new_tokens, _SCORED_TOKENS)
        for decoding in self.decodings:
            for drafting in self.ways:
                comparison = Comparison(self.model, decoding, num_tokens, drafting, self.roundings[decoding.name])
                check = comparison.check_scores(inputs)
                report.scores += [check] if check else []
                progress.update()

    def check_frequencies(self, report: Report, num_samples: int) -> None:
        """Sample continuations of one short prompt with many seeds, and compare their frequencies."""
        table = exact_table(self.model, self.prompts[0][:_SAMPLED_PROMPT])
        for drafting in ways_of_sampling(self.assistant, table):
            report.frequencies.append(check_frequencies(self.model, table, drafting, num_samples, self.seed))


def _idle_drafts(report: Report) -> list[str]:
    """Return warnings for ways of drafting without drafted or without accepted tokens."""
    warnings = []
    for name in dict.fromkeys(check.drafts for check in report.checks if check.drafts != "none"):
        checks = [check.statistics for check in report.checks if check.drafts == name]
        if not sum(item.drafted_tokens for item in checks):
            warnings.append(f"{name}: no drafts, so that nothing was verified; use other or more prompts")
        elif not sum(item.accepted_tokens for item in checks):
            warnings.append(f"{name}: no draft was accepted; only rejections were verified")
    return warnings


class _Collector(logging.Handler):
    def __init__(self, messages: list[str]):
        super().__init__(logging.WARNING)
        self.messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if message not in self.messages:
            self.messages.append(message)


@contextmanager
def _collecting_warnings(messages: list[str]) -> Iterator[None]:
    """Collect this library's warnings, such as that a call was decoded without speculation."""
    logger = logging.getLogger("hf_smartspec")
    handler = _Collector(messages)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
