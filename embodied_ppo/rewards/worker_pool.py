"""Grade in worker processes that may crash or hang without harm to the rest."""

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

from embodied_ppo.core.errors import ConfigError, one_line  # not from types: a worker starts without torch
from embodied_ppo.rewards.graders import FAILED, Grade, Grader, Sample, is_cheap, judge, resolve

if TYPE_CHECKING:
    from embodied_ppo.data.prompts import Prompt

START_S = 120.0
"""How long a worker may take to load its grader, seconds."""


def _serve(spec: str | Grader, pipe: Connection) -> None:
    """A worker's life: None when its grader is loaded (or a text why not), then an answer to every sample."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setsid()  # what a grader starts can be ended with it
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        wait([parent.sentinel])
        os.killpg(os.getpid(), signal.SIGKILL)

    threading.Thread(target=follow, daemon=True).start()
    try:
        grader = resolve(spec)
    except ConfigError as error:
        return pipe.send(str(error))
    pipe.send(None)
    me = os.getpid()
    with suppress(EOFError):
        while True:
            judged = judge(grader, pipe.recv())
            if os.getpid() != me:  # a child that the grader forked and let come back: the answer is its parent's
                os._exit(0)
            pipe.send(judged)


class _Worker:
    """One process, and the sample it is at."""

    def __init__(self, spec: str | Grader) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, far = context.Pipe()
        self.process = context.Process(target=_serve, args=(spec, far), daemon=True, name="grader")
        try:
            self.process.start()
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            self.pipe.close()
            raise ConfigError(
                f"grader = {str(spec)[:80]}: cannot be sent to worker processes ({one_line(error)[:80]}); "
                "define it at the top level of a module, or set workers=0"
            ) from error
        finally:
            far.close()
        self.ready = False
        self.sample: int | None = None
        self.deadline = time.monotonic() + START_S

    def stop(self, *, grace_s: float = 0.0) -> str:
        """End it and what it started; how it ended by itself if it did within ``grace_s``."""
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
            return "the worker stopped answering"
        return f"the worker died of {signal.Signals(-code).name}" if code < 0 else f"the worker exited with code {code}"


class GraderPool:
    """Grades batches, in worker processes that may crash or hang without harm to the rest."""

    def __init__(self, spec: str | Grader, *, workers: int | None, timeout_s: float) -> None:
        """``workers``: processes; 0: in this process and without time limit; None: 0 for a cheap grader, else 2.

        ``timeout_s``: limit of one sample, seconds. Raises ConfigError.
        """
        if workers is not None and workers < 0:
            raise ConfigError(f"workers = {workers} must be >= 0; 0 grades in this process")
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s = {timeout_s:g} must be > 0; write 10")
        self.spec, self.timeout_s = spec, timeout_s
        self.count = workers if workers is not None else 0 if is_cheap(spec) else 2
        self.failures = 0
        """Samples whose grader failed, so far."""
        self.last_failure: str | None = None
        """The first failure of the last batch that had any."""
        self._workers: list[_Worker] = []
        self._closed = False
        self._here = None if self.count else resolve(spec)
        try:
            self._fill()
            while not all(worker.ready for worker in self._workers):
                for worker, message in self._events():
                    if isinstance(message, str):
                        raise ConfigError(
                            message if message.startswith("reward.grader =") else f"reward.grader = {spec}: {message}"
                        )
                    worker.ready = True
        except BaseException:
            self.close()
            raise

    def grade(self, samples: Sequence[Sample], prompts: Sequence[Prompt] = ()) -> list[Grade]:
        """One grade per sample, in their order; ``prompts`` are for other judges."""
        assert not self._closed
        if self._here is not None:
            judged = [judge(self._here, sample) for sample in samples]
        else:
            judged = self._spread(samples)
        failed = [i for i, (_, cause) in enumerate(judged) if cause is not None]
        self.failures += len(failed)
        if failed:
            i = failed[0]
            source, response, truth, _ = samples[i]
            told = f"data_source = {source}, ground_truth = {truth[:60]!r}, response = {response[:60]!r}"
            self.last_failure = f"sample {i} of {len(samples)} ({told}): {judged[i][1]}"
        return [grade for grade, _ in judged]

    def close(self) -> None:
        """End every worker; may be called again."""
        self._closed = True
        while self._workers:
            self._workers.pop().stop()

    def _fill(self) -> None:
        while len(self._workers) < self.count:
            self._workers.append(_Worker(self.spec))

    def _drop(self, worker: _Worker, *, grace_s: float = 0.0) -> str:
        self._workers.remove(worker)
        return worker.stop(grace_s=grace_s)

    def _spread(self, samples: Sequence[Sample]) -> list[tuple[Grade, str | None]]:
        judged: dict[int, tuple[Grade, str | None]] = {}
        todo, trouble, starts = deque(range(len(samples))), "", 0
        try:
            while len(judged) < len(samples):
                if starts == 0 or (not self._workers and starts < 3):
                    starts += 1
                    self._fill()
                for worker in [w for w in self._workers if w.ready and w.sample is None][: len(todo)]:
                    try:
                        worker.pipe.send(samples[todo[0]])
                    except OSError:  # it died meanwhile: not this sample's doing
                        trouble = self._drop(worker)
                        continue
                    worker.sample, worker.deadline = todo.popleft(), time.monotonic() + self.timeout_s
                if not self._workers and starts == 3:
                    judged |= dict.fromkeys(todo, (FAILED, trouble))
                for worker, message in self._events():
                    i, worker.sample = worker.sample, None
                    if i is None:
                        worker.ready, trouble = True, message or ""
                    elif isinstance(message, str):
                        judged[i] = FAILED, message
                        self._fill()
                    else:
                        judged[i] = message
        finally:  # an interrupt: answers to this batch must not be taken for the next one's
            for worker in [w for w in self._workers if w.sample is not None]:
                self._drop(worker)
        return [judged[i] for i in range(len(samples))]

    def _events(self) -> Iterator[tuple[_Worker, Any]]:
        """Wait until a worker says something; those that end or are late are dropped, and a text says why."""
        busy = {w.pipe: w for w in self._workers if not w.ready or w.sample is not None}
        if not busy:
            return
        said = wait(list(busy), max(0.0, min(w.deadline for w in busy.values()) - time.monotonic()))
        for pipe, worker in busy.items():
            if pipe in said:
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
                limit = f"timeout_s = {self.timeout_s:g}" if worker.ready else f"{START_S:g} s to load"
                yield worker, f"took longer than {limit}"
