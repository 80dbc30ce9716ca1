"""Worker processes for graders. A grader that crashes or hangs does not stop the training."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

# Worker processes import this module and start without torch: nothing here may import it.
from embodied_ppo.core.errors import ConfigError, one_line
from embodied_ppo.rewards.graders import (
    FAILED,
    Grade,
    Grader,
    Sample,
    grade_sample,
    is_cheap,
    resolve,
)

if TYPE_CHECKING:
    from embodied_ppo.data.prompts import Prompt

START_S = 120.0
"""Time limit for a worker to load its grader, seconds."""


def _serve(spec: str | Grader, pipe: Connection) -> None:
    """Run a worker: send None after loading the grader, or an error, then grade every sample."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setsid()  # a new process group, so that children of the grader can be killed with it
    parent = multiprocessing.parent_process()
    assert parent is not None

    def exit_with_parent() -> None:
        wait([parent.sentinel])
        os.killpg(os.getpid(), signal.SIGKILL)

    threading.Thread(target=exit_with_parent, daemon=True).start()
    try:
        grader = resolve(spec)
    except ConfigError as error:
        return pipe.send(str(error))
    pipe.send(None)
    pid = os.getpid()
    with suppress(EOFError):
        while True:
            result = grade_sample(grader, pipe.recv())
            if os.getpid() != pid:  # a process that the grader forked; only the parent sends
                os._exit(0)
            pipe.send(result)


class _Worker:
    """One process, and the sample that it is grading."""

    def __init__(self, spec: str | Grader) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, child = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(spec, child), daemon=True, name="grader"
        )
        try:
            self.process.start()
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            self.pipe.close()
            raise ConfigError(
                f"grader = {str(spec)[:80]}: cannot be sent to worker processes"
                f" ({one_line(error)[:80]}); define it at the top level of a module, or set"
                " workers=0"
            ) from error
        finally:
            child.close()
        self.ready = False
        self.sample: int | None = None
        self.deadline = time.monotonic() + START_S

    def stop(self, *, grace_s: float = 0.0) -> str:
        """End the process and its children.

        Returns:
            A description of the end of the process, if it ended within ``grace_s``.
        """
        pid, process = self.process.pid, self.process
        assert pid is not None
        process.join(grace_s)
        code = process.exitcode
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        process.kill()
        process.join()
        process.close()
        self.pipe.close()
        if code is None:
            return "the worker does not respond"
        if code < 0:
            return f"the worker died of {signal.Signals(-code).name}"
        return f"the worker exited with code {code}"


class GraderPool:
    """Grades batches of samples, in worker processes or in this process."""

    def __init__(self, spec: str | Grader, *, workers: int | None, timeout_s: float) -> None:
        """Start the workers.

        Args:
            spec: The grader, see ``graders.resolve``.
            workers: Number of processes. 0: grade in this process, without time limit. None: 0 for
                a cheap grader, else 2.
            timeout_s: Time limit of one sample, seconds.

        Raises:
            ConfigError: The grader cannot be loaded, or an argument is out of range.
        """
        if workers is not None and workers < 0:
            raise ConfigError(f"workers = {workers} must be >= 0; 0 grades in this process")
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s = {timeout_s:g} must be > 0; write 10")
        self.spec, self.timeout_s = spec, timeout_s
        self.count = workers if workers is not None else 0 if is_cheap(spec) else 2
        self.failures = 0
        """Number of samples so far whose grader failed."""
        self.last_failure: str | None = None
        """The first failure of the last batch that had any."""
        self._workers: list[_Worker] = []
        self._closed = False
        self._local_grader = None if self.count else resolve(spec)
        try:
            self._fill()
            while not all(worker.ready for worker in self._workers):
                for worker, message in self._events():
                    if isinstance(message, str):
                        label = "reward.grader = "
                        label = "" if message.startswith(label) else f"{label}{spec}: "
                        raise ConfigError(label + message)
                    worker.ready = True
        except BaseException:
            self.close()
            raise

    def grade(self, samples: Sequence[Sample], prompts: Sequence[Prompt] = ()) -> list[Grade]:
        """Return one grade per sample, in their order; ``prompts`` are not used."""
        assert not self._closed
        if self._local_grader is not None:
            results = [grade_sample(self._local_grader, sample) for sample in samples]
        else:
            results = self._grade_in_workers(samples)
        failed = [i for i, (_, cause) in enumerate(results) if cause is not None]
        self.failures += len(failed)
        if failed:
            i = failed[0]
            source, response, truth, _ = samples[i]
            self.last_failure = (
                f"sample {i} of {len(samples)} (data_source = {source}, ground_truth ="
                f" {truth[:60]!r}, response = {response[:60]!r}): {results[i][1]}"
            )
        return [grade for grade, _ in results]

    def close(self) -> None:
        """End every worker. May be called repeatedly."""
        self._closed = True
        while self._workers:
            self._workers.pop().stop()

    def _fill(self) -> None:
        """Start workers until there are ``count``."""
        while len(self._workers) < self.count:
            self._workers.append(_Worker(self.spec))

    def _drop(self, worker: _Worker, *, grace_s: float = 0.0) -> str:
        """Stop and remove a worker; return a description of its end."""
        self._workers.remove(worker)
        return worker.stop(grace_s=grace_s)

    def _grade_in_workers(self, samples: Sequence[Sample]) -> list[tuple[Grade, str | None]]:
        """Distribute samples to workers; return the grade and the cause of failure of each.

        If all workers die before they are ready, they are started again up to twice.
        """
        results: dict[int, tuple[Grade, str | None]] = {}
        pending, cause, starts = deque(range(len(samples))), "", 0
        try:
            while len(results) < len(samples):
                if starts == 0 or (not self._workers and starts < 3):
                    starts += 1
                    self._fill()
                idle = [w for w in self._workers if w.ready and w.sample is None]
                for worker in idle[: len(pending)]:
                    try:
                        worker.pipe.send(samples[pending[0]])
                    except OSError:  # the worker died before it received this sample
                        cause = self._drop(worker)
                        continue
                    worker.sample = pending.popleft()
                    worker.deadline = time.monotonic() + self.timeout_s
                if not self._workers and starts == 3:
                    results |= dict.fromkeys(pending, (FAILED, cause))
                for worker, message in self._events():
                    i, worker.sample = worker.sample, None
                    if i is None:
                        worker.ready, cause = True, message or ""
                    elif isinstance(message, str):
                        results[i] = FAILED, message
                        self._fill()
                    else:
                        results[i] = message
        finally:
            # After an interrupt, late results of this batch must not reach the next one.
            for worker in [w for w in self._workers if w.sample is not None]:
                self._drop(worker)
        return [results[i] for i in range(len(samples))]

    def _events(self) -> Iterator[tuple[_Worker, Any]]:
        """Wait for messages of workers and yield them.

        Workers that ended or exceeded their time limit are removed. Their message is the cause, as
        a string.
        """
        busy = {w.pipe: w for w in self._workers if not w.ready or w.sample is not None}
        if not busy:
            return
        timeout_s = min(w.deadline for w in busy.values()) - time.monotonic()
        readable = wait(list(busy), max(0.0, timeout_s))
        for pipe, worker in busy.items():
            if pipe in readable:
                try:
                    message = pipe.recv()
                except (EOFError, OSError):
                    message = self._drop(worker, grace_s=1.0)
                else:
                    if isinstance(message, str):
                        self._drop(worker)
                yield worker, message
            elif time.monotonic() > worker.deadline:
                self._drop(worker)
                limit = (
                    f"timeout_s = {self.timeout_s:g}" if worker.ready else f"{START_S:g} s to load"
                )
                yield worker, f"took longer than {limit}"
