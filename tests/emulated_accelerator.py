"""The emulated accelerator itself: what is counted, and what is refused. `test_accelerator.py` runs this file, too."""

import pytest
import torch

from .accelerator import DEVICE, Accelerator


@pytest.fixture
def accelerator():
    with Accelerator() as accelerator:
        yield accelerator


def test_what_the_host_waits_for_is_counted(accelerator):
    values = torch.arange(6.0).to(DEVICE)
    waits = [
        lambda: values.tolist(),
        lambda: values.cpu(),
        lambda: float(values[0]),
        lambda: bool((values > 3).any()),
        lambda: values.nonzero(),
        lambda: values[values > 3],
        lambda: torch.tensor([1, 2], device=DEVICE),
        lambda: torch.arange(3).to(DEVICE),
        lambda: values[torch.tensor([1, 2])],
    ]
    for function in waits:
        with accelerator.counting() as counts:
            function()
        assert counts["waits"] == 1
    with accelerator.counting() as counts:
        torch.arange(3).to(DEVICE, non_blocking=True)
        (values * 2).softmax(0).argmax().add_(torch.zeros(1, device=DEVICE).long()[0])
    assert counts["waits"] == 0 and counts["uploads"] == 1 and counts["dispatched"] >= 5


def test_devices_are_not_mixed(accelerator):
    values = torch.arange(6.0).to(DEVICE)
    assert (values + 1).tolist() == (torch.arange(6.0) + 1).tolist()
    with pytest.raises(RuntimeError, match="tensors of the CPU"):
        values + torch.arange(6.0)
    with pytest.raises(RuntimeError):
        values.numpy()
