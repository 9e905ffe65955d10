"""Options of speculative decoding that a call can pass."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..candidates import TreeCandidateGenerator
from ..candidates.base import most_nodes_of
from ..decoding.learning import Learning
from ..decoding.verify import METHODS
from ..goodput.policy import FixedLength, LengthPolicy, NoSpeculation
from ..validate import is_integer
from .policies import check_policy_name
from .presets import is_source


@dataclass(frozen=True)
class SmartSpecConfig:
    """
    Options of speculative decoding, passed as `assistant=`.

    Args:
        assistant: A preset name ("auto", "suffix", "prompt_lookup", "datastore:PATH", "sssd", "sssd:PATH",
            "suffix_decoding", "token_recycling", "pld", "tuned:PATH", "none"), "mtp" (the target's own MTP layers),
            "early_exit:N" (its first layers), a draft model or its folder or hub id (loaded once for each target), a
            candidate source, or a list of these, which are fused. "tuned:PATH" is the result of `smartspec tune`; each
            model keeps suffix trees of its own for each such file.
        num_nodes (`int`, *optional*): Draft nodes per row at every step. By default, a `GoodputAuction` decides at
            every step how many are drafted, up to the source's `most_nodes` (63 for suffix trees), and which of these
            are verified; models that run row by row get the source's usual size, `default_num_nodes` (16 for suffix
            trees).
        width (`int`, *optional*): For draft models: 1 drafts chains, more drafts trees. By default chains, or, where a
            `GoodputAuction` decides, trees where these pay (see `DraftModelCandidates`).
        verification (`str`): "coupled" (the same tokens for the same seed, whatever is drafted), "rejection" (the
            same distribution; draft models only) or "typical" (Medusa's typical acceptance, *another* distribution:
            sampling rows keep every drafted token that is likely enough. Greedy rows stay as they are).
        policy (`LengthPolicy` or `str`, *optional*): Decides how much to speculate, in place of `num_nodes` and the
            auction. "table" is the `BatchLookupTable` that `smartspec profile --table` has measured for this model,
            machine and kind of source, "roofline" SSSD's free budget (`RooflineBudget`) by the speed of this machine,
            and "roofline:FLOPS,BANDWIDTH" that by operations and bytes per second of a data sheet.
        tokenizer, assistant_tokenizer (`PreTrainedTokenizerBase`, *optional*): Tokenizers of the target and of the
            draft model, where these differ: drafts are translated (see `TranslatedDraftCandidates`). By default, where
            the sizes of the vocabularies differ, the tokenizers that are stored beside the models.
        namespace (`str`): The group of requests whose outputs suffix trees draft from, and which this call's outputs
            join; in an engine, also the group that shares keys and values. Sources of your own get it as
            `SourceRequest.namespace`. Give tenants that must not see one another's text in drafts different namespaces.
        reads (sequence of `str`): Up to two further namespaces that suffix trees draft from (`SourceRequest.reads`).
        references (sequence of sequences of `int`): Token ids of texts that the answers are likely to repeat (a file to
            be edited, a predicted output, retrieved passages), for drafts of this call only: from suffix trees, prompt
            lookup, and sources of your own that use `SourceRequest.references`.
        tag (`str` or sequence of `str`, *optional*): For `RoutedCandidates`: the kind of text of the prompts (a
            drafter's name, a language, a topic, ...), one for all or one for each; None in a sequence: unknown.
        online (`OnlineDistillation`, *optional*): Trains draft models and heads on the call's tokens.
        trace (`bool`): Whether to record which source drafted each token, and every step's draft tree:
            `model.smartspec_statistics.last_traces` then has one `TracedRequest` per row, as have the outputs of an
            engine.
    """

    assistant: Any = "prompt_lookup"
    num_nodes: int | None = None
    width: int | None = None
    verification: str = "coupled"
    policy: LengthPolicy | str | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    assistant_tokenizer: PreTrainedTokenizerBase | None = None
    namespace: str = ""
    reads: Sequence[str] = ()
    references: Sequence[Any] = ()
    tag: str | Sequence[str | None] | None = None
    online: Learning | None = None
    trace: bool = False

    def __post_init__(self) -> None:
        if self.verification not in METHODS:
            raise ValueError(f"`verification` must be one of {sorted(METHODS)}, got {self.verification!r}.")
        if self.num_nodes is not None and (not is_integer(self.num_nodes) or self.num_nodes < 0):
            raise ValueError(f"`num_nodes` must be an integer of at least 0 or None, got {self.num_nodes!r}.")
        if self.width is not None and (not is_integer(self.width) or self.width < 1):
            raise ValueError(f"`width` must be a positive integer, got {self.width!r}.")
        if isinstance(self.policy, str):
            check_policy_name(self.policy)
        elif self.policy is not None and not isinstance(self.policy, LengthPolicy):
            raise TypeError(f"`policy` must be a LengthPolicy or a name, got {type(self.policy).__name__}.")
        if self.num_nodes is not None and self.policy is not None:
            raise ValueError("`num_nodes` and `policy` both say how much to draft: pass one of them.")
        if (self.width or 1) > 1 and (is_source(self.assistant) or self.verification == "rejection"):
            raise ValueError(
                f"`width={self.width}` has an effect on draft models not verified by 'rejection'. Leave it out, "
                "or give it to the source itself."
            )
        for name in ("tokenizer", "assistant_tokenizer"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, PreTrainedTokenizerBase):
                raise TypeError(f"`{name}` must be a tokenizer of transformers, got {type(value).__name__}.")
        items = self.assistant if isinstance(self.assistant, list | tuple) else [self.assistant]
        if self.assistant_tokenizer is not None and all(map(is_source, items)):
            raise ValueError(
                "`assistant_tokenizer` has an effect on draft models only. Leave it out, or pass the model itself as "
                "`assistant`."
            )
        if not isinstance(self.namespace, str) or isinstance(self.reads, str) or len(self.reads) > 2:
            raise ValueError(
                f"`namespace` must be a string and `reads` a list of at most two, got {self.namespace!r} and "
                f"{self.reads!r}."
            )
        for text in self.references:
            if isinstance(text, str) or not all(is_integer(token) and token >= 0 for token in text):
                raise TypeError("`references` must be lists of token ids: pass `tokenizer(text).input_ids`.")
        tags = [self.tag] if isinstance(self.tag, str) or self.tag is None else self.tag
        if not isinstance(tags, list | tuple) or not all(tag is None or (isinstance(tag, str) and tag) for tag in tags):
            raise TypeError(f"`tag` must be a string, or a list of strings with one per prompt, got {self.tag!r}.")
        if self.online is not None and not isinstance(self.online, Learning):
            raise TypeError(f"`online` must be an OnlineDistillation, got {type(self.online).__name__}.")
        if isinstance(self.assistant, SmartSpecConfig):
            raise TypeError("`assistant` of a SmartSpecConfig must not be a SmartSpecConfig itself.")

    def with_tokenizers(
        self, tokenizer: PreTrainedTokenizerBase | None, assistant_tokenizer: PreTrainedTokenizerBase | None
    ) -> "SmartSpecConfig":
        """Return the config with `assistant_tokenizer`, and with `tokenizer` if the config has no tokenizer itself."""
        changes: dict[str, Any] = {}
        if assistant_tokenizer is not None:
            changes["assistant_tokenizer"] = assistant_tokenizer
        if self.tokenizer is None and tokenizer is not None:
            changes["tokenizer"] = tokenizer
        return replace(self, **changes) if changes else self

    def tags_of(self, num_rows: int, per_prompt: int = 1) -> list[str | None]:
        """
        Return the tag of each row; `per_prompt` successive rows belong to one prompt.

        Raises:
            ValueError: if the number of tags differs from the number of prompts.
        """
        if self.tag is None or isinstance(self.tag, str):
            return [self.tag] * num_rows
        if len(self.tag) * per_prompt != num_rows:
            number = num_rows // per_prompt
            raise ValueError(f"`tag` must be one string or one per prompt: got {len(self.tag)} for {number} prompts.")
        return [tag for tag in self.tag for _ in range(per_prompt)]

    @property
    def assignment(self) -> dict[str, Any]:
        """Arguments of `SourceRequest`; empty where the config has no namespaces or references."""
        if not (self.namespace or self.reads or self.references):
            return {}
        references = [np.asarray(text, np.int64) for text in self.references]  # arrays stay the same objects
        return {"namespace": self.namespace, "reads": tuple(self.reads), "references": references}

    def max_nodes_for(self, source: TreeCandidateGenerator) -> int:
        """Return the largest number of draft nodes per row and step: `DecodingCall.max_nodes`."""
        policy = self.policy_for(source)
        most = most_nodes_of(source)
        return most if policy is None else policy.most_nodes(source.default_num_nodes, most)

    def policy_for(self, source: TreeCandidateGenerator) -> LengthPolicy | None:
        """Return the policy set by `policy` or `num_nodes`; None where a `GoodputAuction` is to decide."""
        if self.policy is not None:
            assert not isinstance(self.policy, str), "`resolve` puts the policy in the place of its name"
            return self.policy
        if self.num_nodes is None and source.default_num_nodes > 0 and self.verification != "rejection":
            return None
        return self.fixed_policy_for(source)

    def fixed_policy_for(self, source: TreeCandidateGenerator) -> FixedLength:
        num_nodes = source.default_num_nodes if self.num_nodes is None else self.num_nodes
        if not num_nodes:
            return NoSpeculation()
        return FixedLength(num_nodes, is_usual=self.num_nodes is None)
