"""`smartspec serve --learn`: drafters learn from live traffic, each tenant's apart, and go on after a new start."""

import argparse
import json
import os
import shutil
from contextlib import contextmanager

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("transformers.cli.serving.server")
import httpx
import torch
from starlette.testclient import TestClient
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_smartspec.commands.common.arguments import UsageError
from hf_smartspec.commands.serve.arguments import add_arguments
from hf_smartspec.commands.serve.checks import api_keys, check_arguments
from hf_smartspec.commands.serve.learning import new_learning
from hf_smartspec.commands.serve.serving import loaded_server
from hf_smartspec.serving.server.guard.keys import ApiKeys

from ...serving.helpers import TIMEOUT
from ...serving.server.running import Served
from .. import processes
from ..helpers import EMBEDDED
from .test_command import address

PROMPTS = ["def add(a, b):", "SELECT name FROM", "Tom has 3 apples", "The capital of"]
NUM_TOKENS = 10
OPTIONS = {"every_requests": 4, "learning_rate": 1e-2, "passes": 8}


@pytest.fixture(autouse=True)
def _usual_priority(monkeypatch):
    """On a busy machine, a thread of the lowest priority would learn for minutes."""
    monkeypatch.setattr(os, "setpriority", lambda *_: None)


def answers_of(target) -> list[str]:
    """Return the text of plain `generate`."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    served = Served(model, AutoTokenizer.from_pretrained(target))
    return [served.text(served.alone(prompt, max_new_tokens=NUM_TOKENS)) for prompt in PROMPTS]


def save_random(config, tokenizer, folder):
    """A draft model with random weights, which agrees with the target by chance only."""
    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(config, tie_word_embeddings=False)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    for path in tokenizer.glob("tokenizer*"):
        shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def answers(folder):
    return answers_of(folder / "target")


@pytest.fixture(scope="module")
def draft(folder):
    return save_random(folder / "target", folder / "target", folder / "random")


class Client(TestClient):
    """Clients of a server whose drafters learn."""

    def __init__(self, server):
        super().__init__(server.app)
        (self.served,) = server.models.values()
        self.online = self.served.engine.config.online

    def ask(self, answers, key="", **fields) -> float:
        """Send all prompts, check the answers, let drafters learn, and return the tokens per step."""
        lengths = []
        for prompt, answer in zip(PROMPTS, answers):
            body = {"prompt": prompt, "max_tokens": NUM_TOKENS, **fields}
            found = self.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}).json()
            assert found["choices"][0]["text"] == answer
            lengths.append(found["metrics"]["speculative_decoding"]["mean_acceptance_length"])
        assert self.online.wait(TIMEOUT)
        return sum(lengths) / len(lengths)

    def metrics(self, key="") -> dict[str, float]:
        text = self.get("/metrics", headers={"Authorization": f"Bearer {key}"}).text
        lines = [line.split() for line in text.splitlines() if line.startswith("smartspec:learning_")]
        return {name.partition("{")[0]: float(value) for name, value in lines}

    def taught(self) -> dict[str, int]:
        """Return the number of requests that each drafter has been given to learn from."""
        return {name: item.requests for name, item in self.online.statistics.items()}

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the weights that draft, in one line, by the drafter's place in the server."""
        (routed,) = [stage for stage in self.served.engine.own_assistant().source.stages if hasattr(stage, "drafters")]
        return {
            name: torch.cat([item.flatten() for item in drafter.parameters()])
            for name, drafter in routed.drafters.items()
        }


@contextmanager
def serving(draft, learnt, *words, options=OPTIONS):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    fixed = ["--device", "cpu", "--dtype", "float32", "--assistant", "none", "--max-kv-mib", "64"]
    learning = ["--draft", str(draft), "--learn", str(learnt), "--learn-options", json.dumps(options)]
    args = parser.parse_args([*fixed, *learning, *words])
    check_arguments(args)
    keys = api_keys(args)
    with loaded_server(args, {"demo": str(draft.parent / "target")}, keys) as server:
        yield Client(server), keys


def test_a_server_learns_from_its_traffic_and_keeps_it(answers, draft, tmp_path):
    """Tokens stay, tokens per step rise, `/metrics` counts updates, and a new start takes up what was learnt."""
    with serving(draft, tmp_path) as (client, _):
        first = client.ask(answers)
        for _ in range(3):
            client.ask(answers)
        last = client.ask(answers)
        metrics = client.metrics()
    assert first < 1.2 and last > 2 * first
    assert metrics["smartspec:learning_requests_total"] == 20 and metrics["smartspec:learning_drafters"] == 1
    assert metrics["smartspec:learning_updates_total"] >= 4 and metrics["smartspec:learning_swaps_total"] >= 1
    assert metrics["smartspec:learning_seconds_total"] > 0 <= metrics["smartspec:learning_acceptance"] <= 1
    with serving(draft, tmp_path) as (client, _):
        again = client.ask(answers)
        assert client.metrics()["smartspec:learning_requests_total"] >= 16
    assert again > 0.8 * last
    (path,) = (tmp_path / "demo").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600


def test_keys_learn_apart(answers, draft, tmp_path):
    """No key is drafted for by weights that learnt from another, nor from a key that is not to be learnt from."""
    unlearnt = tmp_path / "unlearnt"
    unlearnt.write_text("c\n")
    keys = ["--api-key", "a", "--api-key", "b", "--api-key", "c", "--no-learn-key-file", str(unlearnt)]
    with serving(draft, tmp_path / "learnt", *keys) as (client, known):
        before = client.weights()
        names = {key: known.caller(f"Bearer {key}").namespace for key in "abc"}
        client.ask(answers, "c")
        client.ask(answers, "b", speculation={"learn": False})
        client.ask(answers, "b", speculation={"assistant": "none"})
        assert set(client.taught().values()) <= {0}
        for _ in range(3):
            rate = client.ask(answers, "a")
        (taught,) = [number for number in client.taught().values() if number]
        assert taught == 12
        after = client.weights()
        changed = [name for name in after if not torch.equal(before[name], after[name])]
        assert changed == [names["a"]] and set(after) == {names["a"], names["b"], "as loaded"}
        assert client.ask(answers, "c") < 1.2 < 1.5 < rate
        assert client.ask(answers, "b") < 1.2
    others = [word for key in "dba" for word in ("--api-key", key)]  # in another order
    with serving(draft, tmp_path / "learnt", *others) as (client, _):
        assert client.ask(answers, "d") < 1.2
        assert client.ask(answers, "a") > 0.8 * rate


def test_keys_may_learn_together_but_for_those_that_do_not(answers, draft, tmp_path):
    unlearnt = tmp_path / "unlearnt"
    unlearnt.write_text("c\n")
    keys = ["--api-key", "a", "--api-key", "b", "--api-key", "c", "--no-learn-key-file", str(unlearnt)]
    keys += ["--assistant", "suffix"]  # which drafts first
    with serving(draft, tmp_path / "learnt", "--learn-tenants", "together", *keys) as (client, _):
        before = client.weights()
        client.ask(answers, "a")
        client.ask(answers, "b")
        client.ask(answers, "c")
        assert list(client.taught().values()) == [8]
        client.ask(answers, "a")
        after = client.weights()
        assert torch.equal(before["as loaded"], after["as loaded"]) and set(after) == {"as loaded", "together"}
        assert not torch.equal(before["together"], after["together"])


@pytest.mark.long
@pytest.mark.end_to_end
@pytest.mark.skipif(torch.cuda.is_available(), reason="the command would take the GPU")
def test_the_command_learns_and_learns_on_after_a_new_start(tmp_path):
    """On the embedded target: `smartspec serve --learn`, ended by SIGTERM and started again."""
    answers = answers_of(EMBEDDED)
    draft = save_random(EMBEDDED.parent / "draft", EMBEDDED, tmp_path / "draft")
    options = json.dumps(OPTIONS | {"background": False})
    words = ["--port", "0", "--dtype", "float32", "--assistant", "none", "--draft", str(draft)]
    words += ["--learn", str(tmp_path / "learnt"), "--learn-options", options]
    losses = []
    for turn, num_rounds in enumerate((4, 1)):
        said = tmp_path / f"said{turn}"
        process = processes.start(processes.run_logged, ["serve", f"demo={EMBEDDED}", *words], said)
        try:
            with httpx.Client(base_url=address(process, said), timeout=TIMEOUT) as client:
                for _ in range(num_rounds):
                    for prompt, answer in zip(PROMPTS, answers):
                        body = {"prompt": prompt, "max_tokens": NUM_TOKENS}
                        found = client.post("/v1/completions", json=body).json()
                        assert found["choices"][0]["text"] == answer
                lines = [line.split('{model_name="demo"} ') for line in client.get("/metrics").text.splitlines()]
                metrics = {name: float(value) for name, value in filter(lambda words: len(words) == 2, lines)}
                assert metrics["smartspec:learning_requests_total"] == 16 + 4 * turn, "a new start goes on counting"
                losses.append(metrics["smartspec:learning_loss"])
            process.terminate()
            process.join(TIMEOUT)
            assert process.exitcode == 0
        finally:
            process.kill()
            process.join()
    # Whether the draft is asked depends on times that are measured, as on how many tokens; what it learnt does not.
    assert losses[1] < losses[0] < 0.5, "a new start goes on from the learnt weights"


@pytest.mark.parametrize(
    "words, message",
    [
        (["--learn-options", "{}", "--learn-tenants", "together"], "need --learn"),
        (["--learn", "LEARNT"], "nothing that learns drafts"),
        (["--learn", "LEARNT", "--draft", "DRAFT", "--learn-options", '{"loss": "huber"}'], "`loss` must be one of"),
        (["--learn", "LEARNT", "--draft", "DRAFT", "--learn-options", '{"los": "kl"}'], "los"),
        (["--learn", "LEARNT", "--draft", "DRAFT", "--learn-options", '{"checkpoint": "x"}'], "folder of --learn"),
        (["--learn", "LEARNT", "--draft", "DRAFT", "--no-learn-key-file", "KEYS"], "there are no keys"),
        (["--learn", "LEARNT", "--assistant", "HEADS", "--api-key", "a"], "keys are kept apart by copies of --draft"),
        (["--learn", "LEARNT", "--draft", "DRAFT", "--api-key", "a", "--no-learn-key-file", "KEYS"], "none of the"),
    ],
)
def test_what_cannot_learn_is_refused_before_anything_is_loaded(draft, tmp_path, words, message):
    (tmp_path / "keys").write_text("z\n")
    names = {
        "LEARNT": tmp_path / "learnt",
        "DRAFT": draft,
        "KEYS": tmp_path / "keys",
        "HEADS": EMBEDDED.parent / "medusa",
    }
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["--device", "cpu", *(str(names.get(word, word)) for word in words)])
    with pytest.raises(UsageError, match=message):
        check_arguments(args)
        api_keys(args)


def test_copies_of_keys_share_the_memory_of_samples(tmp_path):
    """Each key that teaches has an equal part, and the copy that stays as it was loaded needs none."""
    options = {"max_bytes": 1000}
    args = argparse.Namespace(learn=str(tmp_path), learn_options=options, learn_tenants="apart")
    keys = ApiKeys(["a", "b", "c"], unlearnt_keys=["c"])

    def bytes_each():
        return new_learning(args, "demo", keys.callers).options.max_bytes

    assert bytes_each() == 500
    args.learn_tenants = "together"
    assert bytes_each() == 1000
    args.learn_tenants, options["max_bytes"] = "apart", 1
    with pytest.raises(ValueError, match="`max_bytes` 1 is too little for 2 copies"):
        bytes_each()


def namespace(draft, learnt=None, shared=None):
    """The name under which a server keeps what is learnt from a key."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["--learn", learnt, "--draft", draft] if learnt else []
    words += ["--shared", shared] if shared else []
    args = parser.parse_args(["--device", "cpu", "--api-key", "a", *map(str, words)])
    check_arguments(args)
    return api_keys(args).caller("Bearer a").namespace


def test_what_was_learnt_from_a_key_is_found_after_sharing_began_or_ended(draft, tmp_path):
    alone = namespace(draft, tmp_path / "one")
    assert namespace(draft, tmp_path / "one", tmp_path / "shared") == alone
    assert namespace(draft, tmp_path / "two", tmp_path / "shared") == alone == namespace(draft, tmp_path / "two")
    assert namespace(draft, shared=tmp_path / "shared") == alone != namespace(draft, tmp_path / "other")
    with pytest.raises(UsageError, match="names keys by another salt than"):
        namespace(draft, tmp_path / "other", tmp_path / "shared")
