"""Stand-in for CUDA graphs on a CPU, which records the device of each stream and recording."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from embodied_ppo.core import cuda_graph


class Stream:
    """A stream of a device, which does not order anything."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wait_stream(self, other: Stream) -> None:
        assert other.device == self.device


class RecordingCuda:
    """Replaces the functions of ``torch.cuda`` that ``cuda_graph.record_graph`` calls.

    Functions without a device act on device "current", as those of torch act on device 0. A
    recording runs the program on the CPU, which changes its state once; a replay does nothing.

    Attributes:
        device: Current device.
        recorded: Device of each recording and of its stream.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device: Any = "current"
        self.recorded: list[tuple[Any, Any]] = []
        cuda_graph._recording_stream.cache_clear()
        for name, value in {
            "Stream": lambda device=None: Stream(device or self.device),
            "current_stream": lambda device=None: Stream(device or self.device),
            "CUDAGraph": type("CUDAGraph", (), {"replay": lambda graph: None}),
            "device": self._device,
            "stream": self._stream,
            "graph": self._graph,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    @contextmanager
    def _device(self, device: torch.device) -> Iterator[None]:
        before, self.device = self.device, device
        yield
        self.device = before

    @contextmanager
    def _stream(self, stream: Stream) -> Iterator[None]:
        yield

    @contextmanager
    def _graph(self, graph: Any, pool: Any = None, stream: Stream | None = None) -> Iterator[None]:
        self.recorded.append((self.device, None if stream is None else stream.device))
        yield
