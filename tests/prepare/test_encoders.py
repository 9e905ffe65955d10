"""What a call's encoder is given is noted, whoever runs it besides."""

from concurrent.futures import ThreadPoolExecutor

import torch

from hf_smartspec.prepare.encoders import watch_encoder

from ..models import shared_model

IDS = torch.tensor([[3, 4, 5]])


def test_only_this_threads_inputs_are_seen():
    model = shared_model("t5")
    with watch_encoder(model) as seen, ThreadPoolExecutor(1) as other:
        model.get_encoder()(input_ids=IDS)
        other.submit(model.get_encoder(), input_ids=IDS + 1).result()
    assert set(seen) == {"input_ids"} and seen["input_ids"] is IDS
    model.get_encoder()(input_ids=IDS + 2)
    assert seen["input_ids"] is IDS, "behind the context nothing is watched"


def test_other_threads_may_meet_hooks_that_are_half_registered():
    """Engines run encoders while requests are prepared; torch registers a hook first, then that it takes keywords."""
    model = shared_model("t5")
    with watch_encoder(model) as seen, ThreadPoolExecutor(1) as other:
        model.get_encoder()._forward_pre_hooks_with_kwargs.clear()
        other.submit(model.get_encoder(), input_ids=IDS).result()
        assert not seen
