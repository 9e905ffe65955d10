"""Digests of models: what is computed of one need not be computed of equal ones."""

from hashlib import blake2b

import torch

_LARGEST = 1_000_000  # parameters of models whose weights are looked at

_PLAIN = bool | int | float | str | None


def identity(model) -> bytes | None:
    """Digest of all that a model's tokens depend on; None where it is large, or has modules that are not its own."""
    if sum(parameter.numel() for parameter in model.parameters()) > _LARGEST or not is_of_transformers(model):
        return None
    config = model.config
    settings = (
        type(model),
        model.device,
        config._attn_implementation,
        config.to_dict(),
        model.generation_config.to_dict(),
    )
    digest = blake2b(repr(settings).encode(), digest_size=16)
    for module in model.modules():
        own = {name: value for name, value in vars(module).items() if isinstance(value, _PLAIN)}
        digest.update(repr((type(module), own)).encode())
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.cpu().flatten().view(torch.uint8).numpy().tobytes())
    return digest.digest()


def is_of_transformers(model) -> bool:
    return all(type(module).__module__.startswith(("torch.nn.", "transformers.")) for module in model.modules())
