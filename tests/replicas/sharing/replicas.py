"""Replicas with suffix trees that share a folder, for tests."""

import numpy as np

from hf_smartspec import SuffixTreeCandidates
from hf_smartspec.candidates.request import SourceRequest
from hf_smartspec.replicas import SharedOutputs

from ...folders import byte_tokenizer

OPTIONS = {"max_bytes": 2**21, "max_depth": 8, "max_match": 4}
TOKENIZER = byte_tokenizer()


def new_source():
    return SuffixTreeCandidates(**OPTIONS)


def replica(url, **options):
    return SharedOutputs(str(url), TOKENIZER, **options), new_source()


def serve(source, name, prompt, answer, namespace=""):
    """A request, drafted for and observed token by token."""
    source.begin(SourceRequest(name, np.array(prompt), namespace=namespace))
    for token in answer:
        source.propose([name], [8])
        source.observe(name, np.array([token]))
    source.stop(name)


def held(source):
    """Texts that are remembered, by namespace, in any order."""
    return sorted((namespace, tokens.tolist()) for _, namespace, tokens in source.outputs())


def drafted(source, prompt, namespace=""):
    source.begin(SourceRequest("asked", np.array(prompt), namespace=namespace))
    (tree,) = source.propose(["asked"], [8])
    source.stop("asked")
    return tree.tokens.tolist()
