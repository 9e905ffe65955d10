"""Figures and tables of the five papers: what each found, and the commands that play it here."""

from typing import NamedTuple

SQL, SWE, EDITS = (f"demos/agentic/{name}.jsonl.gz" for name in ("sql", "swe", "edit"))
TASKS = f"{SQL} {EDITS} --requests 60 --test 20"  # what the drafters learn
AGENTIC, PROMPTS = f"{SQL} {SWE} {EDITS}", "demos/prompts.jsonl"
REAL_PROMPTS = "demos/real_prompts.jsonl"
EMBEDDED, HEADS = "demos/models/target", "demos/models/smollm2-eagle3"
REAL = "the real engine and model, on this machine"
MATCHED = "the real engine on this machine, with the embedded models at the cost of larger ones"
CONFIGS = "calculated from the configs of models, without running them"
SIMULATED = "simulated: a 7 B model on an A100, by its data sheet"
SIMULATED_8B = "simulated: Llama 3 8 B on the device of SSSD's example, by its data sheet; sources on recorded text"
BY_DATA_SHEET = "computed: the model's config, on the paper's device by its data sheet"
REPLAYED = "recorded answers, replayed without a model"

_AS_SERVED = "published --model MODEL --dtype float32 --max-prompt 256 --max-new-tokens"
_HYBRID = f"--batch-sizes 1 --ways suffix_decoding {HEADS} suffix_decoding+{HEADS} auto auto+{HEADS}"
_SUFFIX_ROWS = "none pld token_recycling suffix_decoding auto"
_POLICIES = "none k=1 k=3 k=5 random table step auction"
_LEARNING = (
    f"online --model MODEL --draft {HEADS} --dtype float32 --prompts {SQL} --requests 80 --test 8 --learning-rate 3e-4"
)
_SHARES = "0.2 0.4 0.6 0.8 0.95 1.1"


class Play(NamedTuple):
    """
    One way to play a figure here.

    Args:
        on (`str`): What is measured.
        command (`str`): Words of a bench, or of `smartspec` where they begin so; MODEL stands for the model.
    """

    on: str
    command: str


class Figure(NamedTuple):
    """
    A figure or table of a paper, and how it is played here.

    Args:
        title (`str`): What the paper shows in it.
        found (`str`): What came out there.
        plays (`Play`): How it is played here; none where no machine of this size can.
    """

    title: str
    found: str
    plays: tuple[Play, ...]


FIGURES: dict[str, dict[str, Figure]] = {
    "smartspec": {
        "1": Figure(
            "speed-up of fixed lengths 1, 3, 5 over the batch size",
            "7 B, acceptance 0.7: long drafts win in small batches, and lose in large ones",
            (Play(SIMULATED, "simulate --figures 1"),),
        ),
        "3": Figure(
            "tokens in a batch, and steps of a request, under the load of Figure 1",
            "the more tokens are proposed, the larger is the batch, and the fewer are the steps",
            (Play(SIMULATED, "simulate --figures 3"),),
        ),
        "5": Figure(
            "goodput over the proposed length, by batch size",
            "7 B on an A100, acceptance 0.7: the best length is above 4 for one request, 0 for the largest batches",
            (Play(SIMULATED, "simulate --figures 5"),),
        ),
        "7": Figure(
            "predicted and profiled seconds of a forward",
            "points along the diagonal for 7 B to 70 B",
            (Play(REAL, "smartspec profile MODEL"),),
        ),
        "10": Figure(
            "lengths of prompts and outputs by data set",
            "chats: medium prompts, longer outputs of higher variance; summaries: long prompts, short outputs",
            (Play("the repository's data sets", f"smartspec replay {AGENTIC} {PROMPTS} --entropy --max-prompt 65536"),),
        ),
        "11": Figure(
            "latency over the request rate with a draft model",
            "7 B to 70 B: up to 3.2 times lower at low rates, as good as no speculation at high ones",
            (
                Play(MATCHED, f"load --sources draft --policies {_POLICIES} --shares {_SHARES}"),
                Play(SIMULATED, "simulate --figures 11"),
            ),
        ),
        "12": Figure(
            "latency over the request rate with prompt lookup",
            "Mistral 7 B and Mixtral: SmartSpec is the best at every rate",
            (
                Play(
                    REAL,
                    "load --model MODEL --sources prompt_lookup --policies none k=3 step auction --shares 0.3 0.9 "
                    "--seconds 50",
                ),
                Play(SIMULATED, "simulate --figures 12"),
            ),
        ),
        "13": Figure(
            "fidelity of the simulator",
            "mean latency off by less than 10 % below saturation",
            (Play(REAL, "load --model MODEL --sources prompt_lookup --simulated"),),
        ),
        "14": Figure(
            "SmartSpec against an oracle and random lengths",
            "a gap to the oracle, far above random",
            (Play(SIMULATED, "simulate --figures 14"),),
        ),
        "15": Figure(
            "Medusa with fixed top k, and chosen by goodput; Figure 16: tokens verified per request",
            "fewer tokens as the rate rises: down to 4 per request, latency below every fixed choice",
            (Play(SIMULATED, "simulate --figures 15"),),
        ),
        "17": Figure(
            "confidence of the draft model in accepted and in rejected tokens",
            "the distributions differ clearly: sure tokens are mostly accepted",
            (Play("the embedded models' own answers and drafts", f"sources --only confidence --prompts {PROMPTS}"),),
        ),
    },
    "sssd": {
        "2": Figure(
            "accepted tokens and cost of a forward over the speculation length",
            "batch size 8: accepted tokens rise faster than the cost up to a budget",
            (Play(REAL, "batch --model MODEL --sources sssd auto --batch-sizes 8 --lengths 0 4 8 16 32"),),
        ),
        "3": Figure(
            "time of products and attention over the speculation length; Table 1: operations and bytes by operator",
            "Llama 2 7 B, batch size 8: flat up to 54 tokens a row; attention costs most at 10,000 tokens of context",
            (Play(BY_DATA_SHEET, "smartspec profile MODEL --operators 280e12,800e9"),),
        ),
        "4": Figure(
            "input, datastore, and both; SSSD as published, REST and PIA",
            "the shares of both nearly add up, and more is accepted than of REST and PIA",
            (Play(REPLAYED, f"sources --only datastore --prompts {AGENTIC} {PROMPTS}"),),
        ),
        "section-4.2": Figure(
            "accepted tokens over the temperature",
            "1 to 2 % fewer at temperature 1 than at 0, 20 % fewer at 2",
            (Play("the embedded target's own answers, replayed", f"sources --only temperature --prompts {PROMPTS}"),),
        ),
        "5": Figure(
            "accepted tokens with a vocabulary of 32,000 (Llama 2) and of 128,256 (Llama 3)",
            "fewer with the larger one, but enough for a speed-up",
            (
                Play(
                    "recorded answers, replayed, in the embedded target's vocabulary of 8,192",
                    f"sources --only datastore --model {EMBEDDED} --prompts {AGENTIC} {PROMPTS}",
                ),
                Play(
                    "the same in the real model's, of 49,152",
                    f"sources --only datastore --model MODEL --prompts {AGENTIC} {PROMPTS}",
                ),
            ),
        ),
        "6": Figure(
            "latency and throughput over the batch size",
            "1.37 to 1.80 times at batch size 64, 2.05 to 2.61 times at 1",
            (
                Play(
                    REAL,
                    f"{_AS_SERVED} 64 --prompts {REAL_PROMPTS} --ways sssd@roofline sssd auto --batch-sizes 1 4 16",
                ),
                Play(
                    f"{REAL}, after answers to 100 other questions",
                    f"{_AS_SERVED} 48 --prompts {SQL} --remember 100 --ways sssd@roofline sssd auto "
                    "--batch-sizes 1 4 16",
                ),
            ),
        ),
        "7": Figure(
            "latency over cost by batch size with Llama 3 8 B: SSSD, PIA, no drafts",
            "gains as with Llama 2 at every size; PIA's are lost in large batches",
            (Play(SIMULATED_8B, f"simulate --figures sssd --prompts {PROMPTS} {EDITS}"),),
        ),
    },
    "osd": {
        "table-1": Figure(
            "acceptance after distillation offline, by kind of sampling",
            "up by 0.10 to 0.65; the teacher's own samples are the best",
            (Play(MATCHED, f"online --parts table --prompts {TASKS}"),),
        ),
        "3": Figure(
            "acceptance over the requests served, against a static drafter; Figure 7, Table 6: tokens that gain most",
            "above the static drafter, of 10 % of the data, after few requests",
            (
                Play(f"{REAL}, algorithm 1 as published", f"{_LEARNING} --parts online --preset published"),
                Play(f"{REAL}, the default", f"{_LEARNING} --parts online"),
                Play(MATCHED, f"online --parts online --prompts {TASKS}"),
            ),
        ),
        "4": Figure(
            "a sudden shift of the requests, against static drafters",
            "recovers after a drop, and ends near a drafter distilled on 70 % of the data",
            (Play(MATCHED, f"online --parts shift --prompts {TASKS}"),),
        ),
        "6": Figure(
            "a drafter for each topic, against one for all",
            "higher acceptance on every topic",
            (Play(MATCHED, f"online --parts several --prompts {TASKS}"),),
        ),
        "9": Figure(
            "requests of two tasks mixed, of which one teaches, then the other",
            "the acceptance of the task that teaches rises, that of the other stays",
            (Play(MATCHED, f"online --parts mix --prompts {TASKS}"),),
        ),
        "table-5": Figure(
            "bytes read without drafts, with them, and with learning; Tables 7 to 9, Eq. 6",
            "1792, 1320 and 573 GB for 128 tokens of Vicuna-7B with LLaMA-160M",
            (Play(CONFIGS, f"online --parts costs --prompts {TASKS}"),),
        ),
        "table-3": Figure(
            "speed-up with a draft model that has learnt; Table 4: Medusa heads",
            "1.36 to 2.17 times; Medusa 1.34, with learning 2.01",
            (
                Play(REAL, f"{_LEARNING} --parts speed"),
                Play(MATCHED, f"online --parts speed --prompts {TASKS}"),
            ),
        ),
    },
    "suffix": {
        "4": Figure(
            "speed-up on agents' requests, against prompt lookup",
            "5.3 times on AgenticSQL, 2.5 times on SWE-Bench, where prompt lookup has 1.5",
            (
                Play(
                    REAL,
                    f"generate {SQL} --model MODEL --dtype float32 --batch-size 1 --limit 16 --max-new-tokens 96 "
                    f"--assistant {_SUFFIX_ROWS} --remember 400",
                ),
                Play(REPLAYED, f"smartspec replay {AGENTIC} --sources pld suffix_decoding suffix"),
            ),
        ),
        "section-4.2": Figure(
            "hybrid: EAGLE-3 heads draft where the trees' score is low",
            "2.5 times on Spec-Bench, where EAGLE-3 has 2.4; on AgenticSQL 4.1, EAGLE-3 1.9, the trees alone 5.3",
            (
                Play(REAL, f"{_AS_SERVED} 64 --prompts {REAL_PROMPTS} --limit 24 {_HYBRID}"),
                Play(
                    f"{REAL}, after answers to 100 other questions",
                    f"{_AS_SERVED} 48 --prompts {SQL} --remember 100 {_HYBRID}",
                ),
            ),
        ),
        "7": Figure(
            "the global tree, the request's, and both",
            "both are the best on most tasks; the global one gives more",
            (Play(REPLAYED, f"sources --only trees --prompts {AGENTIC}"),),
        ),
        "8": Figure(
            "speed-up over the number of outputs in the tree",
            "rises with the tree, also on open chats; acceptance stays",
            (Play(REPLAYED, f"sources --only size --prompts {AGENTIC}"),),
        ),
        "9": Figure(
            "a sudden shift of the requests",
            "1.5 times at first, back to 2.6 after 500 requests",
            (Play(REPLAYED, f"sources --only shift --prompts {EDITS} {SQL}"),),
        ),
        "table-2": Figure(
            "time and memory of a tree as it grows",
            "about 20 microseconds a token; memory is linear",
            (Play(REPLAYED, f"memory --prompts {SWE} {EDITS}"),),
        ),
        "table-3": Figure(
            "hybrid speculation over its threshold; Table 4: on AgenticSQL",
            "best at 5 to 7, near the fallback's accepted tokens; at 0 on AgenticSQL",
            (Play(REPLAYED, f"sources --only hybrid --prompts {AGENTIC} {PROMPTS}"),),
        ),
    },
    "su": {
        "1": Figure(
            "latency per token over batch size and length",
            "the best length falls as batches grow",
            (Play(MATCHED, "batch --batch-sizes 1 2 4 8 16 --lengths 0 1 2 3 4 6 8"),),
        ),
        "4": Figure(
            "the best length of every batch size, by a table, on other prompts than those it was measured with",
            "2.73 times at batch size 1, 1.31 at 32, 1.94 on average",
            (
                Play(
                    f"{REAL}: the table",
                    f"smartspec profile MODEL --table {PROMPTS} --assistant {HEADS} --max-batch-size 16 --max-length 6 "
                    "--max-new-tokens 32 --long-draft 16",
                ),
                Play(
                    f"{REAL}: the table against fixed lengths",
                    f"{_AS_SERVED} 48 --prompts {REAL_PROMPTS} --batch-sizes 1 2 4 8 16 "
                    f"--ways {HEADS}@k=2 {HEADS}@k=4 {HEADS}@table {HEADS}",
                ),
            ),
        ),
        "2": Figure(
            "correct tokens of long drafts over their length; Figure 3: time of a step, over length and batch size",
            "about 0.9 s ** 0.548; lines over s, steeper with more rows",
            (Play(REAL, f"smartspec profile MODEL --table {PROMPTS} --max-batch-size 8 --max-new-tokens 32"),),
        ),
        "5": Figure(
            "latency over interval and burstiness",
            "2.3 times on average; the table is 1.07 times better than the better fixed length",
            (Play(SIMULATED, "simulate --figures cv"),),
        ),
        "6": Figure(
            "latency over time while busy and quiet phases alternate",
            "as good as the better of lengths 2 and 4 in every phase: 9 and 14 % better over all",
            (Play(MATCHED, "timeline --source draft --policies none k=2 k=4 table auction"),),
        ),
    },
}
