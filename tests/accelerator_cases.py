"""Sources, options and counts of what an accelerator is asked for."""

from collections import Counter
from typing import Any

import hf_smartspec
from hf_smartspec import DraftModelCandidates, SmartSpecConfig
from hf_smartspec.drafts.price import LevelPrice
from hf_smartspec.goodput.policy import FixedLength

from .generate.helpers import prompts, tiny_tokenizer

NUM_TOKENS = 14
LENGTHS = (9, 5, 12, 5)  # of prompts
CHAIN, WIDTH, TREE = 4, 3, 9


class Priced(FixedLength):
    """Drafts that are as deep, and as wide, as they are worth."""

    def price(self, rows, stage):
        return LevelPrice(call=0.1, row=0.0, node=0.02)


SOURCES = {
    "none": lambda draft: "none",
    "lookup": lambda draft: SmartSpecConfig("prompt_lookup", num_nodes=CHAIN),
    "suffix": lambda draft: SmartSpecConfig("suffix", num_nodes=8),
    "auto": lambda draft: "auto",
    "chain": lambda draft: SmartSpecConfig(draft, num_nodes=CHAIN),
    "tree": lambda draft: SmartSpecConfig(DraftModelCandidates(draft, width=WIDTH), num_nodes=TREE),
    "two": lambda draft: SmartSpecConfig(["prompt_lookup", draft], num_nodes=CHAIN),
    "priced": lambda draft: SmartSpecConfig(draft, policy=Priced(TREE)),
    "rejection": lambda draft: SmartSpecConfig(draft, num_nodes=CHAIN, verification="rejection"),
}
# Forwards of the draft model, at most.
LEVELS = {"chain": CHAIN, "tree": TREE // WIDTH + 1, "two": CHAIN, "priced": TREE, "rejection": CHAIN}
# Of accepted nodes, in the target's memory and the draft's.
MOVES = {"suffix": 1, "auto": 1, "two": 1, "tree": 2, "priced": 2}
SAMPLING = {"do_sample": True, "seed": 5}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "stop strings": {"stop_strings": ["q", "ab"], "tokenizer": tiny_tokenizer()},
    "sampled": SAMPLING | {"top_k": 0},
    "warped": SAMPLING | {"temperature": 0.8, "top_k": 20, "top_p": 0.95},
    # What depends on the text, or is kept, is picked token by token.
    "penalty": {"repetition_penalty": 1.3},
    "penalty, sampled": SAMPLING | {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    "scores": {"suppress_tokens": [5, 6], "output_scores": True},
}
AT_ONCE = ("greedy", "stop strings", "sampled", "warped")
# What is sent for the picks behind some nodes: keys of their noise, texts for processors.
SENT_TO_PICK = {"sampled": 1, "warped": 1, "penalty": 1, "penalty, sampled": 2}


def generate(models, source: str, options: dict[str, Any], lengths=LENGTHS):
    target, draft = models
    inputs = {name: values.to(target.device) for name, values in prompts(lengths).items()}
    settings = {"max_new_tokens": NUM_TOKENS, "return_dict_in_generate": True} | options
    with hf_smartspec.enabled(target):
        return target.generate(**inputs, assistant=SOURCES[source](draft), **settings)


def tokens_of(output) -> list[list[int]]:
    return output.sequences.cpu().tolist()


def check_counts(steps: list[Counter], source: str, name: str, dispatched: int = 210) -> None:
    """
    One wait for the target's picks, whatever the number of rows, and one for all levels of a draft model; one upload
    for the target's forward, and one for all levels together. Where picks are no arg max, sources that learn from what
    was likely wait once more. A forward dispatches `dispatched` operations at most.
    """
    levels, picks_at_once = LEVELS.get(source, 0), name in AT_ONCE
    waits_of_source = levels > 0 or (source in ("suffix", "auto") and name not in ("greedy", "stop strings"))
    sent = SENT_TO_PICK.get(name, 0)
    of_rejection = 3 if source == "rejection" and sent else 0
    for counts in steps:
        num_picks = 1 if picks_at_once else 1 + counts["accepted"]
        assert counts["waits"] <= waits_of_source + num_picks
        num_forwards = 1 + (levels > 0)
        others = MOVES.get(source, 0) + of_rejection
        assert counts["uploads"] <= num_forwards + sent * num_picks + others
        if picks_at_once:
            assert counts["dispatched"] <= dispatched * (1 + levels)
    assert sum(counts["waits"] for counts in steps) >= len(steps), "nothing was counted"
