"""`python -m benchmarks online`: what drafters learn from the requests that they draft for."""

import argparse
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from torch import nn
from transformers import PreTrainedModel

from benchmarks.kit.plots import check_folder
from hf_smartspec.candidates import MedusaHeads
from hf_smartspec.candidates.committed import LAST
from hf_smartspec.candidates.heads.kinds import load as load_heads
from hf_smartspec.commands.common.arguments import UsageError, usage_errors
from hf_smartspec.commands.common.models import demo_folder, load_draft, load_model
from hf_smartspec.commands.common.outputs import check_output, read_rows
from hf_smartspec.commands.common.recordings import DataSet, Fields, Texts, read_requests
from hf_smartspec.commands.common.setup import load_target, max_prompt_len
from hf_smartspec.online.students import student_of

from ...kit.claims import Claim
from ...kit.models import described
from ...kit.session import Case, Section, new_session, print_head
from ...kit.tables import Row, Rows, as_markdown, print_lines
from .arguments import COSTS, LIVE, LIVE_PARTS, LOAD, ONLINE, SHIFT, SPEED, TABLE
from .costs import Size, costs, paper_pairs
from .live import LEARNT, PUBLISHED, live, load, random_drafter, speed
from .parts import Experiments
from .report import LATEST, plot, tables
from .streams import Task, answer, distilled, mean, options_of

_BASE_EPOCHS = 8


def run(args: argparse.Namespace) -> int:
    for path in (args.json, args.markdown):
        check_output(path)
    if args.plots:
        check_folder(args.plots)
    texts = _texts(args)
    if not set(args.parts) & set(LIVE_PARTS):
        args.parameters = 0  # replayed requests run no forward of the target
    larger, tokenizer = load_target(args)
    if larger.config.is_encoder_decoder and set(args.parts) & set(LIVE_PARTS):
        raise UsageError("--parts: encoder-decoders have the replayed parts only")
    session = new_session(args, larger.device, larger.dtype, {"parameters": larger.num_parameters()}, ["parts"])
    bench = OnlineBench(args, larger, tokenizer, texts)
    exact = session.report["environment"]["dtype"] == "float32"  # else near-ties may be broken in another way
    sections = [
        Section(part, partial(bench.cases, part), show=_show, claims=partial(claims, is_exact=exact))
        for part in args.parts
    ]
    try:
        return session.run(sections, print_head(session, "online", described(args, larger)))
    finally:
        parts = {part: row for part in args.parts for row in session.rows(part).values()}
        if args.markdown and parts:
            args.markdown.write_text(as_markdown(tables(parts)), encoding="utf-8")
        if args.plots and parts:
            plot(parts, args.plots)


def _show(console: Console, rows: Rows) -> None:
    for lines in tables(dict(rows)):
        print_lines(console, lines)


def claims(rows: Rows, is_exact: bool) -> list[Claim]:
    """
    Return whether learning raises acceptance, in the parts that measure it, and whether outputs equal those without
    speculation, in the parts that compare them.
    """
    found = list[Claim]()
    if ONLINE in rows:
        pairs = {name: [mean(row[key][-LATEST:]) for key in ("static", "online")]
                 for name, row in rows[ONLINE]["rows"].items()}  # fmt: skip
        found.append(_raised(f"the last {LATEST} requests: more is accepted than of a drafter of 10 %", pairs))
    for learnt in (PUBLISHED, LEARNT) if SPEED in rows else ():
        pairs = {f"{task}, {name}": [row[name]["acceptance"], row[name + learnt]["acceptance"]]
                 for task, row in rows[SPEED]["rows"].items() for name in row if name + learnt in row}  # fmt: skip
        found.append(_raised(f"held-out requests: more is accepted than before, drafter{learnt}", pairs))
    compared = [rows[LIVE]["different"]] if LIVE in rows else []
    compared += [row["different"] for task in rows.get(SPEED, {"rows": {}})["rows"].values() for row in task.values()]
    if compared and is_exact:
        text = "all outputs are those of plain generate"
        found.append(Claim(text, not any(compared), f"{sum(compared)} differ" if any(compared) else ""))
    return found


def _raised(text: str, pairs: dict[str, list[float]]) -> Claim:
    detail = "; ".join(f"{name} {before:.3f} to {after:.3f}" for name, (before, after) in pairs.items())
    return Claim(text, all(after > before for before, after in pairs.values()), detail)


def _texts(args: argparse.Namespace) -> dict[str, list[Texts]]:
    """Return the requests by task."""
    texts: dict[str, list[Texts]] = {}
    for word in args.files:
        name, _, field = word.partition(":")
        path = Path(name)
        if not field:
            texts[path.name.partition(".")[0]] = read_requests(path, Fields(), None, False)
            continue
        for _, row in read_rows(path):
            if isinstance(row.get("prompt"), str) and row.get(field) is not None:
                texts.setdefault(str(row[field]), []).append(Texts([row["prompt"]], ""))
    if not texts:
        raise UsageError(f"no prompts in {args.files}")
    generator = np.random.default_rng(args.seed)
    return {name: [items[index] for index in generator.permutation(len(items))] for name, items in texts.items()}


class OnlineBench:
    """
    The models and answered requests of all parts, which are made when the first part needs them.

    Args:
        args (`Namespace`): The command's arguments.
        larger (`PreTrainedModel`): The target at the cost at which live parts are measured.
        tokenizer: The target's.
        texts (`dict`): Requests by task.
    """

    def __init__(
        self, args: argparse.Namespace, larger: PreTrainedModel, tokenizer: Any, texts: dict[str, list[Texts]]
    ):
        self.args, self.larger, self.tokenizer = args, larger, tokenizer
        name = args.model or str(demo_folder("--model") / "models" / "target")
        self.small = load_model(name, args.dtype, args.device)
        others = args.requests if SHIFT in args.parts else 0
        sizes = (args.requests + args.test + others, 0, max_prompt_len(args, self.small), args.max_new_tokens)
        self.data = [DataSet.of(name, requests, tokenizer, *sizes) for name, requests in texts.items()]

    def cases(self, part: str) -> list[Case]:
        return [Case(part, partial(self._measured, part))]

    def _measured(self, part: str) -> Row:
        args = self.args
        if part in (TABLE, COSTS) and not isinstance(self._draft, PreTrainedModel):
            raise UsageError(f"--parts: {part} is for draft models, and --draft holds heads")
        if part == COSTS:
            pairs = paper_pairs() | {"this target and drafter": (self.small.config, self._draft.config)}
            sizes = {name: (Size.of(target), Size.of(draft)) for name, (target, draft) in pairs.items()}
            options = {"k": args.nodes, "interval": args.interval}
            return {"rows": {name: costs(target, draft, **options) for name, (target, draft) in sizes.items()}}
        tasks = self._tasks
        if part == SPEED:
            return speed(self.larger, _drafters(self.small, self.larger, self._drafter), tasks, args)
        if part == LIVE:
            return live(self.larger, random_drafter(args.random, self.larger, self._draft, args.seed), tasks, args)
        if part == LOAD:
            return load(self.larger, self._drafter, tasks, args)
        return Experiments(self.small, self._drafter, tasks, args, self.tokenizer).run(part)

    @cached_property
    def _tasks(self) -> list[Task]:
        args = self.args
        layers = student_of(self._drafter).hidden_layers
        layers = (LAST, *layers) if SPEED in args.parts else layers  # for the Medusa heads of part speed
        return [answer(self.small, item, args.test, args, layers) for item in self.data]

    @cached_property
    def _draft(self) -> Any:
        """The draft model, or heads."""
        name = self.args.draft or str(demo_folder("--draft") / "models" / "draft")
        with usage_errors("--draft"):
            heads = load_heads(name, self.small)
        return load_draft(name, self.small, self.args.dtype) if heads is None else heads

    @cached_property
    def _drafter(self) -> nn.Module:
        """The draft model, or one of random weights that is distilled on answers to other prompts."""
        args = self.args
        if args.base is None:
            return self._draft
        if not isinstance(self._draft, PreTrainedModel):
            raise UsageError("--base: only draft models begin with random weights, and --draft holds heads")
        requests = read_requests(args.base, Fields(turns="none"), None, False)
        sizes = (args.requests + 1, 0, args.max_prompt, args.max_new_tokens)
        base = answer(self.small, DataSet.of("base", requests, self.tokenizer, *sizes), 1, args)
        drafter = random_drafter("draft", self.small, self._draft, args.seed)
        return distilled(drafter, base.stream, options_of(args), _BASE_EPOCHS, f"distilling {args.base}")


def _drafters(small: PreTrainedModel, larger: PreTrainedModel, drafter: nn.Module) -> dict[str, nn.Module]:
    """Return the draft model, and the demo's Medusa heads where they fit the target."""
    found = {"draft": drafter}
    folder = demo_folder("--draft") / "models" / "medusa"
    if larger.config.hidden_size == small.config.hidden_size and folder.is_dir():
        try:
            found["medusa"] = MedusaHeads.from_pretrained(str(folder), larger)
        except ValueError:  # of another target
            return found
    return found
