"""Time this machine for both modes: repeated calls, messages, memory copies, parallel cores."""

from __future__ import annotations

import os
import secrets
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from embodied_ppo.placement import cost_model, memory_estimate
from embodied_ppo.placement.channels import Exchange, Message, connect

T = TypeVar("T")

MAX_SIZES = 3
"""Largest number of batch sizes that a line of costs is fitted to."""
MIN_REPEAT_S = 1.0
"""A call is repeated for at least this time and three times, but not for ten times as long."""
BUFFER_BYTES = 1 << 22
"""Bytes that are sent and copied to measure bandwidth."""

Timing = tuple[float, float, float]
"""(size, wall-clock seconds, CPU seconds) of one measurement."""


def fit_cost(timings: Sequence[Timing]) -> cost_model.Cost:
    """Fit wall-clock and CPU seconds as linear functions of the size."""
    wall, cpu = ([(timing[0], timing[i]) for timing in timings] for i in (1, 2))
    return cost_model.Cost(cost_model.fit_line(wall), cost_model.fit_line(cpu))


def select_sizes(sizes: Sequence[int]) -> list[int]:
    """Return the first size, the last one and some between them, ``MAX_SIZES`` at most."""
    last = len(sizes) - 1
    return [sizes[i] for i in sorted({round(k * last / (MAX_SIZES - 1)) for k in range(MAX_SIZES)})]


def trainable_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's float32 gradients."""
    return sum(4 * p.numel() for p in model.parameters() if p.requires_grad)


def timed(call: Callable[[], T]) -> tuple[T, tuple[float, float]]:
    """Return the result of a call, and its wall-clock and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    return result, (time.perf_counter() - wall, time.process_time() - cpu)


def fastest(call: Callable[[], tuple[float, ...]]) -> list[float]:
    """Return the smallest of each measurement of a repeated call, after one call to warm up.

    The minimum is the cost of the work itself: other processes of the machine can only add to it.
    """
    measurements = list[tuple[float, ...]]()
    call()
    start = time.perf_counter()
    while len(measurements) < 3 or time.perf_counter() - start < MIN_REPEAT_S:
        measurements.append(call())
        if time.perf_counter() - start > 10 * MIN_REPEAT_S:
            break
    return [min(values) for values in zip(*measurements, strict=True)]


def time_messages(action: Tensor, answer: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of a message between two processes, and of each byte in it.

    Args:
        action: Content of the request.
        answer: Content of the small reply; the large one has ``BUFFER_BYTES`` more.
    """
    secret = secrets.token_hex(16)
    exchange = Exchange("127.0.0.1", secret, 60.0)
    small, large = {**answer}, {**answer, "more": torch.zeros(BUFFER_BYTES, dtype=torch.uint8)}
    repeats = 200

    def serve() -> None:
        for i in range(2 * repeats):
            connection, message = exchange.receive()
            connection.send(Message("step", message.target, {}, small if i < repeats else large))

    server = threading.Thread(target=serve, daemon=True)
    server.start()
    connection = connect(exchange.address, secret, "tune", peer="the probe", timeout_s=60.0)
    points = list[tuple[float, float]]()
    for value in (small, large):
        seconds = list[float]()
        for _ in range(repeats):
            start = time.perf_counter()
            connection.send(Message("step", 0, {}, action))
            connection.receive()
            seconds.append(time.perf_counter() - start)
        points.append((memory_estimate.nbytes([action, value]), statistics.median(seconds)))
    server.join()
    connection.close()
    exchange.close()
    round_trip = cost_model.fit_line(points)
    return {"message_s": round_trip.fixed / 2, "byte_s": round_trip.each}


def time_copy(device: torch.device) -> float:
    """Return the seconds of copying one byte of host memory to the device, or to the host."""
    x = torch.zeros(BUFFER_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")

    # item() waits for the copy.
    return fastest(lambda: timed(lambda: x.to(device, copy=True)[-1].item())[1])[0] / BUFFER_BYTES


def parallel_cores() -> float:
    """Return the throughput of all cores together over that of one, in matrix products."""
    count = os.cpu_count() or 1
    x = torch.randn(256, 256)
    threads = torch.get_num_threads()

    def work() -> None:
        torch.set_num_threads(1)  # holds for the calling thread only
        for _ in range(100):
            torch.mm(x, x)

    def run_threads(workers: int) -> None:
        pool = [threading.Thread(target=work) for _ in range(workers)]
        for thread in pool:
            thread.start()
        for thread in pool:
            thread.join()

    try:
        one, all_cores = (
            fastest(lambda n=n: timed(lambda: run_threads(n))[1])[0] for n in (1, count)
        )
        return min(count, max(1.0, count * one / all_cores))
    finally:
        torch.set_num_threads(threads)
