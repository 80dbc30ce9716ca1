"""Worker processes for graders. A grader that crashes or hangs does not stop the training."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

# Worker processes import this module and start without torch: nothing here may import it.
from embodied_envs.base.errors import ConfigError
from embodied_ppo.rollout.rewards import graders
from embodied_ppo.rollout.rewards.graders import FAILED, Grade, Grader, Limits, Result, Sample

if TYPE_CHECKING:
    from embodied_ppo.data.prompts import Prompt

START_S = 120.0  # time limit for a worker to load its grader, seconds
GRACE_S = 1.0  # time that a worker has to report that an async grader was too late, seconds


def _serve(spec: str | Grader, pipe: Connection, limits: Limits, option: str) -> None:
    """Run a worker: load the grader, then grade every batch of samples.

    The first message is whether the grader is async, grades batches and reads prompts, or an error.
    ``limits`` are those of an async grader; the parent ends workers whose grader is not async.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setsid()  # a new process group, so that children of the grader can be killed with it
    os.dup2(2, 1)  # what a grader prints goes to stderr: stdout holds only results (--json)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def exit_with_parent() -> None:
        wait([parent.sentinel])
        os.killpg(os.getpid(), signal.SIGKILL)

    # A worker must not outlive a trainer that was killed.
    threading.Thread(target=exit_with_parent, daemon=True).start()
    try:
        # Loading the user's code may fail or hang; the parent waits at most START_S.
        grader = graders.resolve(spec, option)
    except ConfigError as error:
        return pipe.send(str(error))
    pipe.send(graders.kind(grader))
    with suppress(EOFError), asyncio.Runner() as runner:
        while True:
            # One batch at a time, until the parent closes the pipe.
            pipe.send(graders.grade_batch(grader, pipe.recv(), limits, runner))


class _WorkerError(Exception):
    """A worker has ended or does not answer; the message is the cause."""


class _Worker:
    """One process that grades one batch at a time. After a crash the next batch starts it again."""

    def __init__(self, spec: str | Grader, limits: Limits, option: str) -> None:
        self.spec, self.limits, self.option = spec, limits, option
        self.process: Any = None
        self.is_async = self.is_batched = self.reads_prompt = self.is_loaded = False
        self.batch = range(0)  # numbers of the samples that it grades
        self.deadline = 0.0  # time until which the process must answer, of ``time.monotonic``

    def start(self) -> None:
        """Start the process, which then loads the grader."""
        context = multiprocessing.get_context("spawn")
        self.pipe, child = context.Pipe()
        arguments = (self.spec, child, self.limits, self.option)
        process = context.Process(target=_serve, args=arguments, daemon=True, name="grader")
        process.start()
        self.process = process
        child.close()
        self.is_loaded = False
        self.deadline = time.monotonic() + START_S

    def begin(self, batch: range, samples: Sequence[Any]) -> None:
        """Send the samples of a batch; a process that has to load the grader gets them later."""
        self.batch = batch
        if self.process is None or not self.process.is_alive():
            self.stop()
            self.start()
        else:
            self._send(samples)

    def _send(self, samples: Sequence[Any]) -> None:
        """Send the samples of the batch."""
        with suppress(OSError):  # the process has ended, which ``receive`` reports
            self.pipe.send([samples[i] for i in self.batch])
        self.deadline = time.monotonic() + self.limits.timeout_s + GRACE_S * self.is_async

    def receive(self, samples: Sequence[Any]) -> list[Result]:
        """Return the results of the batch, none if they are not complete yet.

        Raises:
            _WorkerError: The process cannot load the grader, has ended, or did not answer before
                the deadline and was ended.
        """
        try:
            message = self.pipe.recv() if self.pipe.poll() else None
        except (EOFError, OSError) as error:
            raise _WorkerError(self.stop(grace_s=1.0)) from error
        if message is None and time.monotonic() >= self.deadline:
            self.stop()
            load = f"took longer than {START_S:g} s to load"
            raise _WorkerError(graders.too_late(self.limits.timeout_s) if self.is_loaded else load)
        if message is None or self.is_loaded:
            return message or []
        # The first message of a process describes the grader, or is an error.
        if isinstance(message, str):
            self.stop()
            raise _WorkerError(message)
        (self.is_async, self.is_batched, self.reads_prompt), self.is_loaded = message, True
        if self.batch:
            self._send(samples)
        return []

    def stop(self, *, grace_s: float = 0.0) -> str:
        """End the process and its children.

        Returns:
            A description of the end of the process, if it ended within ``grace_s``.
        """
        process, self.process = self.process, None
        if process is None:
            return "the worker was closed"
        process.join(grace_s)
        code = process.exitcode
        # Kill the whole process group: the grader may have started processes of its own.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
        if code is None:
            return "the worker does not respond"
        if code < 0:
            return f"the worker died of {signal.Signals(-code).name}"
        return f"the worker exited with code {code}"


class GraderPool:
    """Grades batches of samples, in worker processes or in this process."""

    def __init__(
        self,
        spec: str | Grader,
        *,
        workers: int | None,
        limits: Limits,
        option: str = "reward.grader",
    ) -> None:
        """Start the workers.

        Args:
            spec: The grader, see ``graders.resolve``. An async grader runs on one event loop per
                process. A grader with TRL's signature gets all responses in one call.
            workers: Number of processes. 0: grade in this process; math_verify gets one process
                nevertheless, because its parser cannot be interrupted. None: 0 for a cheap grader,
                else 2.
            limits: Limits of a call. In this process they hold for async graders only.
            option: Path of the option, for messages.

        Raises:
            ConfigError: The grader cannot be loaded.
        """
        self.limits = limits
        # Cheap built-in graders run here, others in two processes.
        self.count = workers if workers is not None else 0 if graders.is_cheap(spec) else 2
        if graders.is_math_verify(spec):
            self.count = max(1, self.count)
        self.failures = 0  # number of samples so far whose grader failed
        self.last_failure: str | None = None  # the first failure of the last batch that had any
        # One event loop for all batches, because open connections belong to a loop.
        self._runner = asyncio.Runner()
        self._local_grader = None if self.count else graders.resolve(spec, option)
        self._is_closed = False
        self._workers = [_Worker(spec, limits, option) for _ in range(self.count)]
        try:
            for worker in self._workers:
                worker.start()
            for worker in self._workers:
                wait([worker.pipe], START_S)
                worker.receive(())
        except (_WorkerError, OSError) as error:  # OSError: too many processes or open files
            self.close()
            label = "" if str(error).startswith(f"{option} = ") else f"{option} = {spec}: "
            raise ConfigError(f"{label}{error}") from error

    def grade(self, samples: Sequence[Sample], prompts: Sequence[Prompt] = ()) -> list[Grade]:
        """Return one grade per sample, in their order; prompts[i] belongs to samples[i].

        Graders that read no prompts need none.
        """
        inputs: Sequence[Any] = samples
        grader, size = self._local_grader, self.limits.concurrency
        if graders.reads_prompt(grader) if grader else self._workers[0].reads_prompt:
            inputs = [
                (*sample, list(p.messages) if p.templated else p.text)
                for sample, p in zip(samples, prompts, strict=True)
            ]
        if grader and graders.is_batched(grader):
            size = max(1, len(samples))
        results: list[Result] = []
        if grader is None:
            results = self._grade_in_workers(inputs)
        else:
            for i in range(0, len(samples), size):
                batch = inputs[i : i + size]
                results += graders.grade_batch(grader, batch, self.limits, self._runner)
        causes = [cause for _, cause in results]
        self.failures += sum(cause is not None for cause in causes)
        # Remember one failure of the batch, for the log.
        self.last_failure = graders.first_failure(samples, causes) or self.last_failure
        return [grade for grade, _ in results]

    def close(self) -> None:
        """End every worker. May be called repeatedly, and while another thread grades."""
        self._is_closed = True
        self._stop_workers()
        self._runner.close()

    def _stop_workers(self) -> None:
        """End every worker; the next batch starts them again."""
        for worker in self._workers:
            worker.stop()
            worker.batch = range(0)

    def _grade_in_workers(self, samples: Sequence[Any]) -> list[Result]:
        """Distribute samples to workers; return the grade and the cause of failure of each."""
        # Several samples go to an async grader at once, all to one of batches, and one to others.
        size = 1
        if self._workers[0].is_batched:
            size = max(1, len(samples))
        elif self._workers[0].is_async:
            size = max(1, min(self.limits.concurrency, len(samples)) // self.count)
        rows = range(len(samples))
        batches = deque(rows[i : i + size] for i in rows[::size])
        results: list[Result] = [(FAILED, "the worker was closed")] * len(samples)
        missing, repeated = len(samples), set[range]()
        try:
            while missing and not self._is_closed:
                for worker in self._workers:
                    if batches and not worker.batch:
                        worker.begin(batches.popleft(), samples)
                busy = [worker for worker in self._workers if worker.batch]
                left_s = min(worker.deadline for worker in busy) - time.monotonic()
                wait([worker.pipe for worker in busy], max(0.0, left_s))
                for worker in busy:
                    batch = worker.batch
                    try:
                        graded = worker.receive(samples)
                    except _WorkerError as error:
                        graded = [(FAILED, str(error))] * len(batch)
                        # The kernel or a user sends SIGKILL. A new process grades the batch, once.
                        if "SIGKILL" in str(error) and batch not in repeated:
                            repeated.add(batch)
                            worker.begin(batch, samples)
                            graded = []
                    if graded:
                        results[batch.start : batch.stop] = graded
                        missing -= len(graded)
                        worker.batch = range(0)
        except BaseException:
            # After an interrupt, late results of this batch must not reach the next one.
            self._stop_workers()
            raise
        return results
