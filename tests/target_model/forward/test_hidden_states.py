"""Hidden states taken by hooks are those that transformers returns, of every model that is served."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from hf_smartspec.drafts.tree import DraftTree
from hf_smartspec.target_model.forward.hidden_states import FedStates, HiddenStateTaps, Piece, select
from hf_smartspec.target_model.layout.rows import CacheRow, RowInput

from ...models import ENCODER_DECODER, PACKED, ROWWISE, shared_model
from ...watching import plain_states

TEXT = list(range(3, 10))


@pytest.mark.parametrize("architecture", [*PACKED, *ROWWISE, *ENCODER_DECODER])
def test_all_architectures(architecture):
    model = shared_model(architecture)
    name, encoder = "input_ids", {}
    if architecture in ENCODER_DECODER:
        name, encoder = "decoder_input_ids", {"encoder_outputs": model.get_encoder()(input_ids=torch.tensor([TEXT]))}
    taps, row = HiddenStateTaps(model), CacheRow(0)
    taps.check([-1, 0, 1, 2])
    with torch.no_grad(), taps.taking([-1, 0, 1, 2]) as fed, taps.installed():
        model(**{name: torch.tensor([TEXT])}, **encoder)
        taps.note([RowInput(row, np.array(TEXT))])
    (taken,) = select([(fed[row], [], len(TEXT))])
    expected = plain_states(model, TEXT, [-1, 0, 1], **encoder)
    for layer, states in expected.items():
        assert torch.equal(taken[layer], states)
    assert taken[2].shape == taken[-1].shape


class _Model(torch.nn.Module):
    """Leaves its input as it is, behind one layer."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Identity()])
        self.base_model = self

    def get_decoder(self):
        return self

    def forward(self, states):
        return (self.layers[0](states),)


def test_pieces_may_have_layers_that_other_rows_needed():
    """Which of these a step takes depends on the rows that run in it."""
    first, second = (
        {layer: torch.full((2, 1), float(step)) for layer in layers} for step, layers in enumerate(((-1, 0), (0, 1)))
    )
    fed = FedStates(0)
    for states in (first, second):
        fed.add(Piece(states, np.array([1]), 1))
    (found,) = select([(fed, (), 9)])
    assert found.keys() == {0} and found[0].flatten().tolist() == [0.0, 1.0]


def test_pieces_that_a_later_forward_replaces_do_not_count():
    """Their layers may be others, and their states are freed."""
    states = [{layer: torch.full((4, 1), float(step))} for step, layer in enumerate((0, 1, 1))]
    first, second, third = FedStates(0), FedStates(2), FedStates(2)
    first.add(Piece(states[1], np.arange(2), 2))
    second.add(Piece(states[0], np.arange(3), 3))
    third.add(Piece(states[2], np.arange(3), 3))
    fed = first.continued(second).continued(third)
    assert [piece.num_fed for piece in fed.pieces] == [2, 3]
    (found,) = select([(fed, (), 9)])
    assert found[1].flatten().tolist() == [1.0, 1.0, 2.0, 2.0, 2.0]
    assert second.continued(third) is third


def test_committed_lines_of_ragged_rows_and_pieces():
    """Two calls: the first runs a piece of one row's prompt; the second its rest, and another row's token and tree."""
    model = _Model()
    taps, long, short = HiddenStateTaps(model), CacheRow(0), CacheRow(1, length=40)
    tree = DraftTree(np.arange(5), np.array([-1, -1, 0, 1, 3]), np.ones(5, np.float32))
    lines = torch.arange(100.0)[None, :, None]
    with taps.taking([0, -1]) as fed, taps.installed():
        model(lines[:, :6])
        taps.note([RowInput(long, np.arange(6))])
        long.length += 6
        model(lines[:, 50:60])
        taps.note([RowInput(short, np.arange(1), tree), RowInput(long, np.arange(3), DraftTree.chain([7]))])
    assert (fed[long].start, fed[long].num_fed, fed[short].start, fed[short].num_fed) == (0, 9, 40, 1)
    rows = [(fed[short], [1, 3, 4], 9), (fed[long], [0], 99), (fed[long], [], 8), (fed[short], [1, 3], 2)]
    for layer in (0, -1):
        shown = [states[layer].flatten().tolist() for states in select(rows)]
        assert shown == [
            [50, 52, 54, 55],
            [0, 1, 2, 3, 4, 5, 56, 57, 58, 59],
            [0, 1, 2, 3, 4, 5, 56, 57],
            [50, 52],
        ]


class Selections(TorchFunctionMode):
    """Counts them. To patch the method itself would leave a class of tensors that is another one for good."""

    num = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.num += func in (torch.Tensor.__getitem__, torch.Tensor.index_select)
        return func(*args, **(kwargs or {}))


def test_one_selection_for_all_rows():
    model = _Model()
    taps, rows = HiddenStateTaps(model), [CacheRow(slot) for slot in range(20)]
    with taps.taking([0, -1]) as fed, taps.installed():
        model(torch.arange(40.0)[None, :, None])
        taps.note([RowInput(row, np.arange(2)) for row in rows])
    with Selections() as selections:
        assert len(select([(fed[row], [], 2) for row in rows])) == 20
    assert selections.num == 2, "one for each layer"


def test_one_selection_for_all_steps_that_rows_have_waited_for():
    model = _Model()
    taps, rows, held = HiddenStateTaps(model), [CacheRow(slot) for slot in range(3)], {}
    for step in range(5):
        with taps.taking([0, -1]) as fed, taps.installed():
            model(torch.arange(8.0)[None, :, None] + 10 * step)  # padded by two
            taps.note([RowInput(row, np.arange(2)) for row in rows])
        for row in rows:
            held[row] = held[row].continued(fed[row]) if row in held else fed[row]
            row.length += 2
    with Selections() as selections:
        found = select([(held[row], [], 99) for row in rows[:2]])
    assert selections.num == 2, "one for each layer"
    for number, states in enumerate(found):
        expected = [10 * step + 2 * number + place for step in range(5) for place in (0, 1)]
        assert states[0].flatten().tolist() == expected
    assert held[rows[0]].num_held == 30, "lines of all rows are held for one's"


def test_states_of_another_shape_are_not_taken():
    model, row = _Model(), CacheRow(0)
    taps = HiddenStateTaps(model)
    for states in (torch.zeros(2, 1, 7, 4), torch.zeros(1, 6, 4)):  # several streams, or fewer tokens than were fed
        with taps.taking([-1]) as fed, taps.installed():
            model(states)
            taps.note([RowInput(row, np.arange(7))])
        assert not fed


def test_other_threads_may_meet_hooks_that_are_half_registered():
    """torch registers a hook first, and then that it takes keywords."""
    model = shared_model("llama")
    taps = HiddenStateTaps(model)
    with torch.no_grad(), taps.taking([0]), taps.installed(), ThreadPoolExecutor(1) as other:
        taps._decoder()[1][0]._forward_pre_hooks_with_kwargs.clear()
        other.submit(model, input_ids=torch.tensor([TEXT])).result()
        assert not taps._states


def test_hooks_go_with_errors():
    model = _Model()
    taps = HiddenStateTaps(model)
    with pytest.raises(AttributeError), taps.taking([0, -1, 1]), taps.installed():
        assert len(model.layers[0]._forward_pre_hooks) == len(model.layers[0]._forward_hooks) == 1
        model(None).nonsense  # noqa: B018
    assert not model.layers[0]._forward_pre_hooks and not model.layers[0]._forward_hooks and not model._forward_hooks
