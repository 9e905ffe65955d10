"""What models cost on devices that are not here, from data sheets."""

from typing import NamedTuple

from ..goodput.cost import CostModel


class Device(NamedTuple):
    """
    Args:
        flops (`float`): Operations per second that matrix products reach.
        bandwidth (`float`): Bytes per second that reading from memory reaches.
        launch (`float`): Seconds per layer in which the device waits for its next kernels.
    """

    flops: float
    bandwidth: float
    launch: float

    @classmethod
    def a100(cls) -> "Device":
        """
        NVIDIA A100 80 GB: 312 TFLOP/s in bfloat16 and 2.0 TB/s by its data sheet; 0.35 of the former and 0.8 of
        the latter are taken to be reached, and 0.1 ms per layer to be spent between kernels in eager mode.
        """
        return cls(0.35 * 312e12, 0.8 * 2.0e12, 1e-4)


def datasheet_cost(
    device: Device, num_parameters: float, num_layers: int, hidden_size: int, bytes_per_value: int = 2
) -> CostModel:
    """
    T = alpha * N_context + gamma * N_batched + delta (SmartSpec, Eq. 7) of a dense model with one key-value head per
    head: weights and cached keys and values are read once per forward, and every token takes two operations per
    parameter. (What is read and what is computed overlap in truth; the sum errs on the slow side.)
    """
    alpha = 2 * num_layers * hidden_size * bytes_per_value / device.bandwidth
    gamma = 2 * num_parameters / device.flops
    return CostModel(alpha, gamma, num_parameters * bytes_per_value / device.bandwidth + num_layers * device.launch)
