"""Between the host and a device, without waiting where that can be avoided.

A copy from ordinary memory makes the host wait for everything that the device still has to do; one from pinned memory is only
put in line. torch hands a pinned buffer out again when the copies from it are done (its allocator records an event for each),
so a new buffer per copy is safe, and after the first few it costs no allocation.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def host_words(count: int, device: torch.device) -> Tensor:
    """int64 [count] on the host, not initialised; pinned when ``device`` copies from pinned memory."""
    return torch.empty(count, dtype=torch.int64, pin_memory=device.type == "cuda")


def on_device(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As ``torch.tensor(values, dtype=dtype, device=device)``."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def moved(host: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on ``device``."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def read(tensor: Tensor) -> Tensor:
    """The tensor on the host. This waits for the device: a step does it once, for its verdict or its drafts."""
    return tensor.cpu()
