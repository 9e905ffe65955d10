"""What each of two processes runs that hold a target together; says what it has got as JSON lines."""

import faulthandler
import json
import os
import sys
import time

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from hf_smartspec import Engine, FixedLength, SmartSpecConfig, enable

from ..serving.helpers import TIMEOUT

RANK = int(os.environ["RANK"])
LENGTHS = {"max_new_tokens": 24, "eos_token_id": None, "pad_token_id": 0}
LONG = {"max_new_tokens": 1900, "eos_token_id": None}  # they run until others have come, also on slow machines


class FailsOnce(FixedLength):
    """A policy of the first process's that fails at its third step."""

    num_steps = 0

    def select(self, rows, trees):
        self.num_steps += 1
        if self.num_steps == 3:
            raise ZeroDivisionError("on purpose")
        return super().select(rows, trees)


def say(**found):
    with open(sys.argv[1], "a") as file:
        print(json.dumps(found), file=file)


def generate(model, sources, rows):
    """Greedy and sampled."""
    ids = (torch.arange(3, 19)[None] + 7 * torch.arange(rows)[:, None]) % 60
    plain = model.generate(ids, do_sample=False, assistant="none", **LENGTHS)
    sampled = model.generate(ids, do_sample=True, seed=5, assistant="none", **LENGTHS)
    for name, source in sources.items():
        found = model.generate(ids, do_sample=False, assistant=source, **LENGTHS)
        again = model.generate(ids, do_sample=True, seed=5, assistant=source, **LENGTHS)
        free = model.generate(ids, do_sample=True, assistant=source, **LENGTHS)  # each would draw a seed of its own
        say(
            test="generate",
            where=[model.config.model_type, name, rows],
            is_same=torch.equal(found, plain),
            is_sampled_same=torch.equal(again, sampled),
            free=free.tolist(),
        )


def serve(model, draft):
    """Requests that arrive at other moments in each process."""
    prompts = [[3 + k, 9, 4, 9, 4, 9, 4 + k] for k in range(8)]
    alone = []
    for k, ids in enumerate(prompts):
        text = model.generate(torch.tensor([ids]), assistant="none", do_sample=k % 2 > 0, seed=k, **LENGTHS)
        alone.append(text[0, len(ids) :].tolist())
    with Engine(model, ["suffix", draft], max_batch_size=4) as engine:
        for k, ids in enumerate(prompts):
            time.sleep(0.004 * ((7 * k + 5 * RANK) % 4))  # no event: the moments are what is tested
            engine.add_request(ids, request_id=str(k), do_sample=k % 2 > 0, seed=k, **LENGTHS)
        found = [engine.get_result(str(k), timeout=TIMEOUT).generated_tokens for k in range(len(prompts))]
        engine.add_request(prompts[0], request_id="long", **LONG)
        if RANK == 0:
            engine.cancel_request("long")
        long, accepted = engine.get_result("long", timeout=TIMEOUT), engine.statistics.accepted_tokens
    with Engine(model, ["suffix", draft], max_batch_size=4) as engine:
        one, other = (SmartSpecConfig(["suffix", draft], namespace=name) for name in "ab")
        for k in range(4):
            engine.add_request(prompts[k], request_id=f"hold {k}", streaming=True, assistant=one, **LONG)
        next(engine.request_id_iter("hold 3"))  # all places are taken
        for k, ids in enumerate(prompts):
            engine.add_request(ids, request_id=f"turn {k}", do_sample=k % 2 > 0, seed=k, assistant=other, **LENGTHS)
        turns = [engine.get_result(f"turn {k}", timeout=TIMEOUT).generated_tokens for k in range(len(prompts))]
        say(test="engine", found=found, turns=turns, alone=alone, accepted=accepted,
            reason=long.finish_reason, gave_way=engine._runner.num_suspended)  # fmt: skip
        for k in range(4 if RANK == 0 else 0):  # what is left of them need not be waited for
            engine.cancel_request(f"hold {k}")


def fail(model, draft):
    """What only the first process meets ends the call in all of them."""
    policy = FailsOnce(2) if RANK == 0 else FixedLength(2)
    ids = torch.tensor([[3, 9, 4, 9, 4, 9]])
    for name, assistant in {
        "failure": SmartSpecConfig("prompt_lookup", policy=policy),
        "sharded draft": model,
        "time": "suffix",
        "rejection": SmartSpecConfig(draft, verification="rejection"),
    }.items():
        more = {"max_time": 9.0} if name == "time" else {}
        try:
            model.generate(ids, assistant=assistant, **LENGTHS, **more)
        except Exception as error:
            say(test=name, error=f"{type(error).__name__}: {error}")
    say(test="after", tokens=model.generate(ids, assistant="suffix", **LENGTHS).tolist())
    with Engine(model, "suffix") as engine:
        try:
            with engine.pause():
                pass
        except NotImplementedError as error:
            say(test="pause", error=str(error))


def load(folder):
    """Sharded, and whole as a draft."""
    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=torch.float32)
    enable(model)
    return model, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def main():
    sys.argv[1] += os.environ["RANK"]
    faulthandler.dump_traceback_later(1200, exit=True)  # a forward that not all run never ends
    torch.set_num_threads(1)
    for folder in sys.argv[3:]:
        model, draft = load(folder)
        generate(model, {"fixed": SmartSpecConfig(["prompt_lookup", draft], num_nodes=4)}, 3)
    model, draft = load(sys.argv[2])
    for rows in (1, 3):
        generate(model, {"suffix": "suffix", "draft": draft, "both": ["prompt_lookup", draft]}, rows)
    serve(model, draft)
    fail(model, draft)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
