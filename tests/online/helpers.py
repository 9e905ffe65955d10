"""Tiny targets, drafters of every kind that learns, and samples of requests."""

import numpy as np
import torch
from transformers import GenerationMixin

from hf_smartspec import DraftModelCandidates, FeatureCandidates, MedusaCandidates, MedusaHeads, SmartSpecConfig
from hf_smartspec.online.learner import Learner
from hf_smartspec.online.options import LearningOptions
from hf_smartspec.online.samples import Sample
from hf_smartspec.online.students import student_of
from hf_smartspec.training.eagle import new_heads

from ..models import VOCAB_SIZE, new_model

TIMEOUT = 600.0  # a process may get a minute of no processor on a busy machine
EAGER = {"every_requests": 1, "shadow": 0, "tolerance": 1.0, "learning_rate": 3e-3, "batch_tokens": 64}
KINDS = ("draft", "medusa", "eagle3")


def new_target(seed: int = 0, **options):
    return new_model("llama", seed=seed, **options)


def new_drafter(kind: str, target):
    """A drafter with random weights."""
    if kind == "draft":
        return new_model("llama", seed=1)
    if kind == "eagle3":
        return new_heads(target, torch.arange(0, VOCAB_SIZE, 2), seed=1)
    generator = torch.Generator().manual_seed(1)
    size = target.config.hidden_size
    blocks = [[(torch.randn(size, size, generator=generator) * 0.1, torch.zeros(size))] for _ in range(3)]
    return MedusaHeads(blocks, [target.get_output_embeddings().weight.detach()], shares_output=True)


SOURCES = {"draft": DraftModelCandidates, "medusa": MedusaCandidates, "eagle3": FeatureCandidates}


@torch.no_grad()
def sample_of(target, prompt, response, layers=(), top_k=8) -> Sample:
    """What ought to be kept of a request, from one plain forward over its text."""
    ids = torch.tensor([[*prompt, *response]])
    output = target(ids, output_hidden_states=True)
    states = (*output.hidden_states[:-1], None, target.model(ids).last_hidden_state)
    best = output.logits[0, len(prompt) - 1 : -1].float().softmax(-1).topk(top_k)
    return Sample(
        np.array(prompt, np.int32),
        np.array(response, np.int32),
        best.indices.int(),
        best.values.half(),
        np.zeros(len(response), bool),
        True,
        {layer: states[layer][0, :-1] for layer in layers},
    )


def samples_of(target, num: int, layers=(), seed: int = 0, length: int = 12) -> list[Sample]:
    """Greedy answers to random prompts."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(num):
        prompt = torch.randint(3, VOCAB_SIZE, (1, 5), generator=generator)
        text = target.generate(prompt, max_new_tokens=length, do_sample=False, eos_token_id=None)[0].tolist()
        found.append(sample_of(target, text[:5], text[5:], layers))
    return found


def generate(target, online, drafter, **options):
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    output = target.generate(ids, assistant=SmartSpecConfig(drafter, online=online), max_new_tokens=12, **options)
    assert torch.equal(output, GenerationMixin.generate(target, ids, max_new_tokens=12))


def weights_of(draft):
    return [item.clone() for item in draft.parameters()]


def are_equal(first, second) -> bool:
    return all(torch.equal(*pair) for pair in zip(first, second))


def student_with(drafter):
    """What learns of a drafter, and holds it."""
    student = student_of(drafter)
    student.drafter = drafter
    return student


def learner_of(target, kind="draft", checkpoint=None, **options):
    options = {"learning_rate": 3e-3, "every_requests": 4, "shadow": 2, "batch_tokens": 64, "top_k": 8, **options}
    return Learner(student_with(new_drafter(kind, target)), LearningOptions(**options), checkpoint)


def feed(learner, target, num=12, seed=0):
    for sample in samples_of(target, num, learner.student.hidden_layers, seed):
        learner._keep(sample)
