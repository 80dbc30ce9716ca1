"""Messages between processes: words, numbers and tensors (never code) over TCP, in order."""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import io
import json
import selectors
import socket
import struct
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from embodied_ppo.core.errors import one_line
from embodied_ppo.core.types import ProcessLost

Value = Tensor | dict[str, Any] | None
"""A tensor, None, or a dictionary of such, as deep as it likes."""

ALIGN = 16
HELLO = struct.Struct("<32s96s")
"""A caller's greeting: the SHA-256 of the secret, and its name. Without the secret nothing is parsed."""
PREFIX = struct.Struct("<QQ")
"""Bytes of the words, bytes of the tensors."""
GREETING_S = 5.0
"""Time limit of a caller's whole greeting, seconds."""
UNGREETED = 64
"""Most connections that have not completed their greeting; a further one replaces the oldest."""
BUFFER = 4 << 20
"""Bytes that may be under way: an action always fits, so that both ends may send at once."""
SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of a network interface."""
WORDS = 64 << 20
"""Most bytes of words in a message."""
NO_MESSAGE = (ValueError, TypeError, AttributeError, LookupError, RuntimeError, OverflowError, RecursionError)
"""What ``unpack`` raises for bytes that ``pack`` did not make."""


@dataclass(frozen=True)
class Message:
    """word: what is asked or answered; to: which of the receiver's; facts: plain JSON; value: tensors on the CPU."""

    word: str
    to: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)
    value: Value = None


def pack(m: Message) -> list[memoryview]:
    """The message as pieces of bytes; those of tensors share their memory."""
    leaves: list[Tensor] = []

    def form(x: Value) -> Any:
        if x is None:
            return None
        if isinstance(x, Mapping):
            return {name: form(inner) for name, inner in x.items()}
        leaves.append(x.detach().cpu().contiguous())
        return len(leaves) - 1

    shape = form(m.value)
    kinds = [[str(x.dtype).removeprefix("torch."), list(x.shape)] for x in leaves]
    words = json.dumps([m.word, m.to, m.facts, shape, kinds]).encode()
    pieces, total = list[memoryview](), 0
    for x in leaves:
        if size := x.numel() * x.element_size():
            pieces.append(x.view(-1).view(torch.uint8).numpy().data)
            pieces.append(memoryview(bytes(-size % ALIGN)))
            total += size + -size % ALIGN
    return [memoryview(PREFIX.pack(len(words), total) + words), *pieces]


def unpack(words: bytes, payload: Tensor) -> Message:
    """The way back; tensors share the memory of ``payload``, uint8 [bytes]."""
    word, to, facts, shape, kinds = json.loads(words)
    leaves, at = list[Tensor](), 0
    for kind, size in kinds:
        dtype = getattr(torch, kind)
        count = torch.Size(size).numel() * dtype.itemsize
        leaves.append(payload[at : at + count].view(dtype).view(size))
        at += count + -count % ALIGN

    def fill(x: Any) -> Value:
        if isinstance(x, Mapping):
            return {name: fill(inner) for name, inner in x.items()}
        return None if x is None else leaves[x]

    return Message(word, to, facts, fill(shape))


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


class Line:
    """One end of a connection to another process. Raises ProcessLost where that is gone or silent."""

    def __init__(self, connection: socket.socket, peer: str, patience_s: float) -> None:
        """``peer``: who is at the other end, for messages; ``patience_s``: how long to wait for it."""
        self.connection, self.peer, self.patience_s = connection, peer, patience_s
        self.waited_s = 0.0
        """For messages, so far."""
        connection.settimeout(patience_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for way in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, way, BUFFER)

    def greet(self, secret: str, name: str) -> None:
        """Say who is calling."""
        self._push([memoryview(HELLO.pack(_digest(secret), name.encode()[:96]))])

    def send(self, m: Message) -> None:
        self._push(pack(m))

    def _push(self, pieces: list[memoryview]) -> None:
        try:
            while pieces:
                sent = self.connection.sendmsg(pieces[:64])
                while pieces and sent >= len(pieces[0]):
                    sent -= len(pieces.pop(0))
                if sent:
                    pieces[0] = pieces[0][sent:]
        except OSError as error:
            raise self._lost(error) from error

    def receive(self) -> Message:
        prefix, start = bytearray(PREFIX.size), time.monotonic()
        self._fill(memoryview(prefix))
        self.waited_s += time.monotonic() - start
        length, size = PREFIX.unpack(prefix)
        if length > WORDS:
            raise ProcessLost(f"{self.peer}: sent what is no message (it announces {length} bytes of words)")
        try:
            words, payload = bytearray(length), torch.empty(size, dtype=torch.uint8)
        except (OverflowError, RuntimeError, TypeError) as error:  # the second is torch's word for no memory
            raise ProcessLost(f"{self.peer}: announces {size} bytes, which there is no room for") from error
        self._fill(memoryview(words))
        if size:
            self._fill(payload.numpy().data)
        try:
            return unpack(bytes(words), payload)
        except NO_MESSAGE as error:
            raise ProcessLost(f"{self.peer}: sent what is no message ({one_line(error, kind=True)})") from error

    def _fill(self, room: memoryview) -> None:
        try:
            while room:
                count = self.connection.recv_into(room)
                if not count:
                    raise ProcessLost(f"{self.peer}: the process is gone (connection closed)")
                room = room[count:]
        except OSError as error:
            raise self._lost(error) from error

    def _lost(self, error: OSError) -> ProcessLost:
        if isinstance(error, TimeoutError):
            return ProcessLost(f"{self.peer}: no answer for {self.patience_s:g} s (cluster.step_timeout_s)")
        return ProcessLost(f"{self.peer}: the process is gone ({error.strerror or error})")

    def close(self) -> None:
        self.connection.close()


def dial(address: tuple[str, int], secret: str, name: str, *, peer: str, patience_s: float) -> Line:
    """A line to whoever listens at ``address`` and knows ``secret``; ``name``: who is calling."""
    try:
        line = Line(socket.create_connection(address, patience_s), peer, patience_s)
    except OSError as error:
        where = f"{peer} at {address[0]}:{address[1]}"
        raise ProcessLost(
            f"{where}: cannot be reached within {patience_s:g} s (cluster.step_timeout_s): {error}"
        ) from error
    line.greet(secret, name)
    return line


class _Greeting:
    """A connection whose caller has not completed its greeting, which is read without waiting."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection, self.deadline = connection, time.monotonic() + GREETING_S
        self.hello = b""

    def advance(self) -> bool:
        """Read what has arrived; return whether more must follow. Raises OSError."""
        try:
            data = self.connection.recv(HELLO.size - len(self.hello))
        except BlockingIOError:
            return True
        self.hello += data
        return bool(data) and len(self.hello) < HELLO.size

    def name(self, secret: str) -> str | None:
        """The caller's name; None if the greeting is incomplete or its secret is another one."""
        if len(self.hello) < HELLO.size:
            return None
        digest, name = HELLO.unpack(self.hello)
        if not hmac.compare_digest(digest, _digest(secret)):
            return None
        return name.rstrip(b"\0").decode(errors="replace")


class Exchange:
    """Accepts connections and receives from whichever is ready.

    Callers without the secret are disconnected. None of them delays a caller that has greeted: greetings are read
    without waiting, each has ``GREETING_S`` in total, and at most ``UNGREETED`` are under way.
    """

    def __init__(self, host: str, secret: str, patience_s: float) -> None:
        self.secret, self.patience_s = secret, patience_s
        self.waited_s = 0.0
        """Time spent without a message, so far."""
        self.greetings: dict[socket.socket, _Greeting] = {}
        """Connections without a complete greeting, oldest first."""
        self.listening = socket.create_server((host, 0))
        self.listening.setblocking(False)  # a caller may be gone again before it is accepted
        self.address: tuple[str, int] = self.listening.getsockname()[:2]
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listening, selectors.EVENT_READ)

    def receive(self) -> tuple[Line, Message]:
        """Return the next message of any caller that has greeted.

        Raises:
            ProcessLost: no such message began within ``patience_s``, whatever other callers do meanwhile.
        """
        start = time.monotonic()
        while True:
            now = time.monotonic()
            for greeting in [g for g in self.greetings.values() if g.deadline <= now]:
                # The greeting may have arrived in time, while this process answered another caller.
                self._advance(greeting)
                if greeting.connection in self.greetings:
                    self._hang_up(greeting)
            deadline = min([start + self.patience_s, *(g.deadline for g in self.greetings.values())])
            ready = self.selector.select(max(0.0, deadline - now))
            for key, _ in ready:
                if key.fileobj is self.listening:
                    self._accept()
                elif isinstance(key.data, _Greeting) and key.fileobj in self.greetings:  # not replaced just now
                    self._advance(key.data)
            line = next((key.data for key, _ in ready if isinstance(key.data, Line)), None)
            if line is not None:
                self.waited_s += time.monotonic() - start
                return line, line.receive()
            if time.monotonic() - start >= self.patience_s:
                self.waited_s += time.monotonic() - start
                raise ProcessLost(f"no request for {self.patience_s:g} s (cluster.step_timeout_s)")

    def _accept(self) -> None:
        try:
            connection, _ = self.listening.accept()
        except OSError:  # the caller is gone, or there is no file descriptor left
            return
        if len(self.greetings) >= UNGREETED:
            oldest = next(iter(self.greetings.values()))
            self._advance(oldest)
            if oldest.connection in self.greetings:
                self._hang_up(oldest)
        greeting = self.greetings[connection] = _Greeting(connection)
        self.selector.register(connection, selectors.EVENT_READ, greeting)

    def _advance(self, greeting: _Greeting) -> None:
        try:
            if greeting.advance():
                return
        except OSError:
            return self._hang_up(greeting)
        name = greeting.name(self.secret)
        if name is None:
            return self._hang_up(greeting)
        del self.greetings[greeting.connection]
        line = Line(greeting.connection, name, self.patience_s)
        self.selector.modify(greeting.connection, selectors.EVENT_READ, line)

    def _hang_up(self, greeting: _Greeting) -> None:
        del self.greetings[greeting.connection]
        self.selector.unregister(greeting.connection)
        greeting.connection.close()

    def close(self) -> None:
        for key in list(self.selector.get_map().values()):
            self.selector.unregister(key.fileobj)
            if key.data is not None:
                key.data.connection.close()
        self.listening.close()
        self.selector.close()


def interface(host: str) -> str | None:
    """The network interface of this machine with IPv4 address ``host``; None: there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                found = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == host:
                    return name
    return None


# -------------------------------------------------------------------------------------------------- asking, answering
class Answering(Protocol):
    """What a process does for others."""

    def answer(self, who: str, m: Message) -> Message:
        """What is said to one request."""
        ...

    def phase(self, word: str) -> str:
        """Of training, that a request belongs to."""
        ...

    def close(self) -> None: ...


class Server:
    """Has ``answering`` do what others ask of it, one request after the other."""

    def __init__(self, answering: Answering, exchange: Exchange) -> None:
        self.answering, self.exchange = answering, exchange
        self.cpu_s: dict[str, float] = defaultdict(float)

    def serve(self, callers: int) -> None:
        """Until so many callers have said "done"."""
        while callers:
            line, m = self.exchange.receive()
            if m.word == "done":
                callers -= 1
            else:
                start = time.process_time()
                line.send(self.answering.answer(line.peer, m))
                self.cpu_s[self.answering.phase(m.word)] += time.process_time() - start

    def close(self) -> None:
        self.answering.close()
        self.exchange.close()


class Desk:
    """One connection to a ``Server``, which several here share: answers are sorted by whose they are."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.made = 0
        self._kept: dict[int, deque[Message]] = defaultdict(deque)

    def number(self) -> int:
        """A new one."""
        self.made += 1
        return self.made - 1

    def send(self, word: str, to: int, value: Value = None, **facts: Any) -> None:
        """Ask, and do not wait."""
        self.line.send(Message(word, to, facts, value))

    def receive(self, to: int) -> Message:
        """The next answer to ``to``."""
        while not self._kept[to]:
            m = self.line.receive()
            self._kept[m.to].append(m)
        return self._kept[to].popleft()

    def ask(self, word: str, to: int, value: Value = None, **facts: Any) -> Message:
        """Ask and wait."""
        self.send(word, to, value, **facts)
        return self.receive(to)

    def done(self) -> None:
        """Say that nothing more will be asked for now."""
        self.line.send(Message("done"))


def frozen(state: Mapping[str, Any] | None) -> Tensor | None:
    """A state as torch.save writes it, uint8 [bytes]."""
    if state is None:
        return None
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def thawed(data: Value) -> dict[str, Any]:
    """The way back, on the CPU; nothing but tensors and plain values is read."""
    return torch.load(io.BytesIO(as_tensor(data).numpy().tobytes()), map_location="cpu", weights_only=True)


def as_tensor(value: Value) -> Tensor:
    assert isinstance(value, Tensor)
    return value
