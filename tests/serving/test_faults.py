"""One request's own failures are its own: processors, criteria, streamers, sources and forwards that fail."""

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import hf_smartspec
from hf_smartspec import Engine, SuffixTreeCandidates
from hf_smartspec.target_model.compat import RequestStatus

from ..generate.helpers import VOCAB_SIZE, tiny_llama
from .helpers import Asked, random_requests
from .test_engine import TIMEOUT, check_all, suffix


@pytest.fixture
def model():
    return tiny_llama()


class Fails(LogitsProcessor):
    def __init__(self, error):
        self.error = error

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] > 8:
            raise self.error("of the user")
        return scores


class FailsToo(StoppingCriteria):
    def __init__(self, error):
        self.fails = Fails(error)

    def __call__(self, input_ids, scores, **kwargs):
        return self.fails(input_ids, torch.zeros(1, 1)) is None


class FailsWhileStreaming(BaseStreamer):
    def __init__(self, error):
        self.error = error

    def put(self, value):
        Fails(self.error)(torch.zeros(1, 9), None) if value.numel() == 1 else None

    def end(self):
        raise self.error("again")


@pytest.mark.parametrize("error", [ArithmeticError, SystemExit])
@pytest.mark.parametrize(
    "fault",
    [
        lambda error: {"logits_processor": LogitsProcessorList([Fails(error)])},
        lambda error: {"stopping_criteria": StoppingCriteriaList([FailsToo(error)])},
        lambda error: {"streamer": FailsWhileStreaming(error)},
    ],
    ids=["processor", "criterion", "streamer"],
)
def test_faults_of_one_request(model, fault, error):
    requests = random_requests(6)
    with Engine(model, suffix(), max_batch_size=4) as engine:
        names = [engine.add_request(asked.prompt, **asked.arguments) for asked in requests[:3]]
        bad = engine.add_request([3, 4, 5], max_new_tokens=20, eos_token_id=None, **fault(error))
        names += [engine.add_request(asked.prompt, **asked.arguments) for asked in requests[3:]]
        outputs = [engine.get_result(name, timeout=TIMEOUT) for name in names]
        failure = engine.get_result(bad, timeout=TIMEOUT)
    assert failure.status == RequestStatus.FAILED and "of the user" in failure.error
    assert failure.finish_reason == "error"
    for asked, output in zip(requests, outputs):
        assert output.generated_tokens == asked.alone(model)


def test_scores_that_are_not_a_number_are_one_requests_own():
    """Tokens of these requests are picked together."""
    model, bad = tiny_llama(), 7
    with torch.no_grad():
        model.get_input_embeddings().weight[bad] = torch.nan
        model.lm_head.weight[bad] = 0.0  # never among the best, so that no request generates it
    settings = {"do_sample": True, "top_k": 4, "max_new_tokens": 8, "eos_token_id": None}
    requests = [Asked([8 + index, 20, 9, 30], settings, seed=index) for index in range(4)]
    with Engine(model, suffix(), max_batch_size=4) as engine:
        with engine.pause():
            names = [engine.add_request(asked.prompt, **asked.arguments) for asked in requests]
            names.append(engine.add_request([8, bad, 9], **settings, seed=1))
        *outputs, failure = [engine.get_result(name, timeout=TIMEOUT) for name in names]
    assert failure.finish_reason == "error" and "No token can be sampled" in failure.error
    assert not failure.generated_tokens
    for asked, output in zip(requests, outputs):
        assert output.error is None and output.generated_tokens == asked.alone(model)


def test_a_forward_that_fails_ends_those_that_were_in_it(model, caplog):
    requests = random_requests(6)
    with Engine(model, suffix(), max_batch_size=3) as engine:
        forward = engine._runner.memory.forward
        run, calls = forward._run, []

        def failing(*args):
            calls.append(None)
            if len(calls) == 3:
                raise RuntimeError("out of memory")
            return run(*args)

        forward._run = failing
        with engine.pause():
            names = [
                engine.add_request(asked.prompt, **asked.arguments | {"max_new_tokens": 9, "eos_token_id": None})
                for asked in requests
            ]
        outputs = [engine.get_result(name, timeout=TIMEOUT) for name in names]
    failures = [output for output in outputs if output.error is not None]
    assert 1 <= len(failures) <= 3 and all("out of memory" in output.error for output in failures)
    for asked, output in zip(requests, outputs):
        expected = Asked(asked.prompt, asked.settings | {"max_new_tokens": 9, "eos_token_id": None}, asked.seed)
        assert output.error is not None or output.generated_tokens == expected.alone(model)


class Faulty(SuffixTreeCandidates):
    """Fails at some of its calls."""

    def __init__(self, where: str):
        super().__init__(max_bytes=2**20)
        self.where, self.count = where, 0

    def _maybe(self, where):
        self.count += where == self.where
        if where == self.where and self.count % 5 == 4:
            raise ArithmeticError("of the source")

    def begin(self, request):
        self._maybe("begin")
        super().begin(request)

    def propose(self, request_ids, max_nodes):
        self._maybe("propose")
        trees = super().propose(request_ids, max_nodes)
        if self.where == "wild":
            trees[0] = hf_smartspec.DraftTree.chain([VOCAB_SIZE + 5, -1])
        return trees

    def observe(self, request_id, tokens):
        self._maybe("observe")
        super().observe(request_id, tokens)

    def stop(self, request_id):
        super().stop(request_id)
        self._maybe("stop")


@pytest.mark.parametrize("where", ["begin", "propose", "wild", "observe", "stop"])
def test_sources_that_fail(model, where):
    with Engine(model, Faulty(where), max_batch_size=4) as engine:
        check_all(engine, model, random_requests(12))
