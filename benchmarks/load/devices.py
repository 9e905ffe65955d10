"""Cost models of devices that are not at hand, from data sheets."""

from typing import NamedTuple

from hf_smartspec.goodput import CostModel


class Device(NamedTuple):
    """
    Speed of a device.

    Args:
        flops (`float`): Operations per second that matrix products reach.
        bandwidth (`float`): Bytes per second that reads from memory reach.
        launch (`float`): Seconds per layer in which the device waits for its next kernels.
    """

    flops: float
    bandwidth: float
    launch: float

    @classmethod
    def a100(cls) -> "Device":
        """
        NVIDIA A100 80 GB: 312 TFLOP/s in bfloat16 and 2.0 TB/s by its data sheet, assumed to be reached to 0.35 and
        0.8. Between kernels, 0.1 ms per layer are assumed, as in eager mode.
        """
        return cls(0.35 * 312e12, 0.8 * 2.0e12, 1e-4)


def datasheet_cost(
    device: Device, num_parameters: float, num_layers: int, hidden_size: int, bytes_per_value: int = 2
) -> CostModel:
    """
    Return the cost model T = alpha * N_context + gamma * N_batched + delta (SmartSpec, Eq. 7), in seconds, of a dense
    model with one key-value head per head: a forward reads weights and cached keys and values once, and computes two
    operations per token and parameter. (Reads and computation overlap in truth; their sum errs on the slow side.)
    """
    alpha = 2 * num_layers * hidden_size * bytes_per_value / device.bandwidth
    gamma = 2 * num_parameters / device.flops
    return CostModel(alpha, gamma, num_parameters * bytes_per_value / device.bandwidth + num_layers * device.launch)
