"""Host memory for a sleeping trainer's tensors."""

from collections.abc import Iterable

import torch
from torch import Tensor


class HostCopies:
    """Moves storages off the device and back; tensors and views stay valid. Reuses slow-to-pin memory."""

    def __init__(self):
        self._host: list[Tensor] = []  # pinned, [bytes] each
        self._away: list[Tensor] = []  # views of the freed storages

    @property
    def size(self) -> int:
        """The bytes of host memory that are reserved."""
        return sum(map(len, self._host))

    def move_out(self, tensors: Iterable[Tensor]) -> None:
        """Copy each storage once and free it. Later calls must begin with the same tensors, in order."""
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors}
        for number, storage in enumerate(storages.values()):
            on_device = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            if number == len(self._host):
                pin = on_device.is_cuda
                self._host.append(torch.empty(len(on_device), dtype=torch.uint8, pin_memory=pin))
            self._host[number].copy_(on_device, non_blocking=True)
            self._away.append(on_device)
        for on_device in self._away:
            on_device.untyped_storage().resize_(0)

    def move_in(self) -> None:
        for on_device, host in zip(self._away, self._host, strict=True):
            on_device.untyped_storage().resize_(len(host))
            on_device.copy_(host, non_blocking=True)
        self._away = []
