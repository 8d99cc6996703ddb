"""Read a GPU's clock and power through NVIDIA's management library.

A reading at one moment is of whatever the device runs then. The power of one operation is measured by running nothing
else for WINDOW seconds, and reading the device's energy counter before and after.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

WINDOW = 5.0  # seconds
WINDOW_SECONDS = 1.2 * WINDOW  # what a window takes with its warm-up
PowerReading = tuple[float | None, float | None]  # SM clock in MHz, power in W; None if unknown


class Gauge:
    """The clock and power of one device; None for a CPU, without pynvml, and for a GPU that reports none."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._handle = device, None
        if device.type == "cuda":
            try:
                import pynvml

                pynvml.nvmlInit()
                uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
                self._handle, self._nvml = pynvml.nvmlDeviceGetHandleByUUID(uuid), pynvml
            except Exception:  # not installed, not permitted, or a GPU that it does not know: the columns stay empty
                self._handle = None

    @property
    def reads(self) -> bool:
        """Whether the device reports anything."""
        return self._handle is not None

    def read(self) -> PowerReading:
        """Return the clock and power at this moment."""
        if not self.reads:
            return None, None
        nvml, handle = self._nvml, self._handle
        clock = self._query(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        power = self._query(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        return clock, None if power is None else power / 1000

    def window(self, operation: Callable[[], Any]) -> PowerReading:
        """Repeat an operation for WINDOW seconds; return the clock at the end and the mean power."""
        if not self.reads:
            return None, None
        for seconds in (WINDOW / 5, WINDOW):  # the first time brings the device to the operation's own clock
            began, before = time.perf_counter(), self._energy()
            while time.perf_counter() - began < seconds:
                for _turn in range(4):
                    operation()
                torch.cuda.synchronize(self._device)
        clock, after, took = self.read()[0], self._energy(), time.perf_counter() - began
        return clock, None if before is None or after is None else (after - before) / 1000 / took

    def _energy(self) -> float | None:
        """Return the millijoules used since the driver was loaded."""
        return self._query(lambda: self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))

    def _query(self, query: Callable[[], Any]) -> float | None:
        """Return what the library answers, or None if it refuses."""
        try:
            return float(query())
        except self._nvml.NVMLError:
            return None
