"""How small arrays come to a device."""

from typing import ClassVar

import pytest
import torch

from hf_smartspec.device import StagingBuffer


class Copied:
    """An event; a copy is under way until somebody has waited for it."""

    under_way: ClassVar[set] = set()

    def record(self, stream) -> None:
        self.under_way.add(self)

    def synchronize(self) -> None:
        self.under_way.discard(self)


class Pinned(torch.Tensor):
    """A buffer on the host; to write to it while it is being read is an error."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        out = (kwargs or {}).get("out")
        if function is torch.cat and isinstance(out, Pinned):
            assert not any(event.buffer == out.data_ptr() for event in Copied.under_way), "it is still being read"
        return super().__torch_function__(function, types, args, kwargs)


@pytest.fixture
def staging(monkeypatch):
    """With buffers as for a GPU, whose copies take until they are waited for."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    staging = StagingBuffer()
    staging._on_host = [torch.empty(64, dtype=torch.int64).as_subclass(Pinned) for _ in range(2)]
    staging._copied = [Copied(), Copied()]
    for event, buffer in zip(staging._copied, staging._on_host):
        event.buffer = buffer.data_ptr()
    Copied.under_way.clear()
    return staging


def test_buffers_are_not_overwritten_while_they_are_read(staging):
    target, used = torch.zeros(5, dtype=torch.int64), []
    for number in range(6):
        staging._copy_pinned([torch.arange(3) + number, torch.tensor([7, 8])], target)
        assert target.tolist() == [number, number + 1, number + 2, 7, 8]
        used.append(staging._on_host[0].data_ptr())
        assert 0 < len(Copied.under_way) <= 2
    assert used[::2] == used[:1] * 3 and used[1::2] == used[1:2] * 3 and used[0] != used[1]


def test_what_stays_on_the_cpu_is_not_copied():
    tensors = [torch.arange(3), torch.arange(4).view(2, 2)]
    assert all(sent is tensor for sent, tensor in zip(StagingBuffer().send(tensors, torch.device("cpu")), tensors))


def test_what_arrives_has_its_shape_and_comes_to_one_place():
    """The meta device, where there is nothing but shapes and buffers."""
    staging, device = StagingBuffer(), torch.device("meta")
    tensors = [torch.arange(3), torch.arange(4).view(2, 2), torch.empty(0, dtype=torch.int64)]
    sent = staging.send(tensors, device)
    assert [item.shape for item in sent] == [item.shape for item in tensors]
    buffer = staging._on_device
    assert staging.send([torch.arange(1000)], device)[0]._base is buffer and staging._on_device is buffer
    assert len(staging.send([torch.arange(10_000)], device)[0]) == 10_000 and staging._on_device is not buffer
    assert staging.send([], device) == []
