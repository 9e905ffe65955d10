"""What a stopwatch counts: forwards of one model, written out or not."""

import numpy as np

from benchmarks.kit.timing import Stopwatch
from hf_smartspec.target_model.layout.rows import RowInput
from hf_smartspec.target_model.written import packed_forward, written_decoder
from tests.models import new_model


def run(model):
    forward = packed_forward(model)
    forward.forward([RowInput(forward.add(), np.array([3, 4, 5]))])


def test_written_out_decoders_are_timed_as_such_and_each_by_itself():
    model, other = new_model("llama"), new_model("llama")
    written_decoder(model), written_decoder(other)
    watch, other_watch = Stopwatch(), Stopwatch()
    with watch.attached_to(model), other_watch.attached_to(other):
        assert written_decoder(model) is not None, "nothing keeps it from being used"
        run(model)
    assert watch.seconds > 0 == other_watch.seconds
    before = watch.seconds
    run(model)
    assert watch.seconds == before


def test_models_own_forwards_are_timed_where_they_run():
    model, watch = new_model("llama"), Stopwatch()
    model.model.layers[0].register_forward_hook(lambda *_: None)
    with watch.attached_to(model):
        assert written_decoder(model) is None
        run(model)
    assert watch.seconds > 0
