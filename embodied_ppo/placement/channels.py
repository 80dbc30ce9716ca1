"""Messages between processes over TCP: method name, JSON data and tensors, never code."""

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
"""A tensor, None, or a dictionary of values, nested to any depth."""

ALIGN = 16
"""Alignment of each tensor in the payload, bytes."""
HELLO = struct.Struct("<32s96s")
"""Greeting of a caller: SHA-256 of the secret, and the caller's name.

Nothing else is parsed before it is verified.
"""
PREFIX = struct.Struct("<QQ")
"""Size of the JSON header and size of the tensor payload, bytes."""
GREETING_S = 5.0
"""Time limit of a caller's whole greeting, seconds."""
UNGREETED = 64
"""Maximum number of connections without a complete greeting; a further one replaces the oldest."""
BUFFER = 4 << 20
"""Socket buffer, bytes.

An action always fits, so that both ends may send at once without a deadlock.
"""
SIOCGIFADDR = 0x8915
"""Linux ioctl: the IPv4 address of a network interface."""
MAX_HEADER = 64 << 20
"""Maximum size of the JSON header of a message, bytes."""
INVALID_MESSAGE = (
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    RuntimeError,
    OverflowError,
    RecursionError,
)
"""Exceptions that ``unpack`` raises for bytes that ``pack`` did not produce."""


@dataclass(frozen=True)
class Message:
    """A request or a reply.

    Attributes:
        method: The operation that is requested or replied to.
        target: Number of the object at the server that the request is for; a reply repeats it.
        data: Plain JSON values.
        value: Tensors; received ones are on the CPU.
    """

    method: str
    target: int = 0
    data: Mapping[str, Any] = field(default_factory=dict)
    value: Value = None


def pack(message: Message) -> list[memoryview]:
    """Return the message as byte chunks. Chunks of CPU tensors share the tensors' memory."""
    leaves: list[Tensor] = []

    def structure(x: Value) -> Any:
        """The value with each tensor replaced by its index in ``leaves``."""
        if x is None:
            return None
        if isinstance(x, Mapping):
            return {name: structure(inner) for name, inner in x.items()}
        leaves.append(x.detach().cpu().contiguous())
        return len(leaves) - 1

    value = structure(message.value)
    types = [[str(x.dtype).removeprefix("torch."), list(x.shape)] for x in leaves]
    header = json.dumps([message.method, message.target, message.data, value, types]).encode()
    chunks, payload_size = list[memoryview](), 0
    for x in leaves:
        if size := x.numel() * x.element_size():
            chunks.append(x.view(-1).view(torch.uint8).numpy().data)
            chunks.append(memoryview(bytes(-size % ALIGN)))
            payload_size += size + -size % ALIGN
    return [memoryview(PREFIX.pack(len(header), payload_size) + header), *chunks]


def unpack(header: bytes, payload: Tensor) -> Message:
    """Return the message that ``pack`` wrote.

    Args:
        header: JSON header, without the prefix.
        payload: uint8 [bytes]. The tensors of the message share its memory.

    Raises:
        INVALID_MESSAGE: One of these exceptions, where ``pack`` did not write the bytes.
    """
    method, target, data, structure, types = json.loads(header)
    leaves, offset = list[Tensor](), 0
    for name, shape in types:
        dtype = getattr(torch, name)
        size = torch.Size(shape).numel() * dtype.itemsize
        leaves.append(payload[offset : offset + size].view(dtype).view(shape))
        offset += size + -size % ALIGN

    def fill(x: Any) -> Value:
        if isinstance(x, Mapping):
            return {name: fill(inner) for name, inner in x.items()}
        return None if x is None else leaves[x]

    return Message(method, target, data, fill(structure))


def _digest(secret: str) -> bytes:
    """SHA-256 of the secret."""
    return hashlib.sha256(secret.encode()).digest()


class Connection:
    """One end of a TCP connection to another process.

    Methods raise ProcessLost where the other process has ended or does not answer in time.
    """

    def __init__(self, sock: socket.socket, peer: str, timeout_s: float) -> None:
        """Configure a connected socket.

        Args:
            sock: The connected socket.
            peer: Name of the process at the other end, for error messages.
            timeout_s: Time limit of each send and receive.
        """
        self.socket, self.peer, self.timeout_s = sock, peer, timeout_s
        self.waited_s = 0.0
        """Time spent so far waiting for a message to begin."""
        sock.settimeout(timeout_s)
        # Without TCP_NODELAY a small request waits for the acknowledgement of the previous one
        # (Nagle).
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for direction in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, direction, BUFFER)

    def send_greeting(self, secret: str, name: str) -> None:
        """Authenticate this process, and give its name (at most 96 bytes are sent)."""
        self._write([memoryview(HELLO.pack(_digest(secret), name.encode()[:96]))])

    def send(self, message: Message) -> None:
        """Send a message; return when all bytes are in the socket's buffer."""
        self._write(pack(message))

    def _write(self, chunks: list[memoryview]) -> None:
        """Write all chunks."""
        try:
            while chunks:
                sent = self.socket.sendmsg(chunks[:64])
                while chunks and sent >= len(chunks[0]):
                    sent -= len(chunks.pop(0))
                if sent:
                    chunks[0] = chunks[0][sent:]
        except OSError as error:
            raise self._lost(error) from error

    def receive(self) -> Message:
        """Wait for the next message and return it."""
        prefix, start = bytearray(PREFIX.size), time.monotonic()
        self._read(memoryview(prefix))
        self.waited_s += time.monotonic() - start
        header_size, payload_size = PREFIX.unpack(prefix)
        if header_size > MAX_HEADER:
            raise ProcessLost(
                f"{self.peer}: sent an invalid message (it announces a header of {header_size}"
                " bytes)"
            )
        try:
            header, payload = bytearray(header_size), torch.empty(payload_size, dtype=torch.uint8)
        except (OverflowError, RuntimeError, TypeError) as error:  # RuntimeError: out of memory
            raise ProcessLost(
                f"{self.peer}: announces {payload_size} bytes, more than memory holds"
            ) from error
        self._read(memoryview(header))
        if payload_size:
            self._read(payload.numpy().data)
        try:
            return unpack(bytes(header), payload)
        except INVALID_MESSAGE as error:
            raise ProcessLost(
                f"{self.peer}: sent an invalid message ({one_line(error, kind=True)})"
            ) from error

    def _read(self, buffer: memoryview) -> None:
        """Fill the buffer."""
        try:
            while buffer:
                count = self.socket.recv_into(buffer)
                if not count:
                    # ray_worker recognises "the process is gone" as a consequence of another
                    # process's failure.
                    raise ProcessLost(f"{self.peer}: the process is gone (connection closed)")
                buffer = buffer[count:]
        except OSError as error:
            raise self._lost(error) from error

    def _lost(self, error: OSError) -> ProcessLost:
        """The error of a connection that timed out or was closed."""
        if isinstance(error, TimeoutError):
            return ProcessLost(
                f"{self.peer}: no answer for {self.timeout_s:g} s (cluster.step_timeout_s)"
            )
        return ProcessLost(f"{self.peer}: the process is gone ({error.strerror or error})")

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()


def connect(
    address: tuple[str, int], secret: str, name: str, *, peer: str, timeout_s: float
) -> Connection:
    """Connect to an ``Exchange``.

    Args:
        address: Host and port of the exchange.
        secret: The secret of the exchange.
        name: Name of this process.
        peer: Name of the other process, for error messages.
        timeout_s: Time limit of connecting, and of each send and receive afterwards.

    Raises:
        ProcessLost: The address cannot be reached in time.
    """
    try:
        connection = Connection(socket.create_connection(address, timeout_s), peer, timeout_s)
    except OSError as error:
        raise ProcessLost(
            f"{peer} at {address[0]}:{address[1]}: cannot be reached within {timeout_s:g} s "
            f"(cluster.step_timeout_s): {error}"
        ) from error
    connection.send_greeting(secret, name)
    return connection


class _Greeting:
    """An accepted socket whose greeting is incomplete; it is read without blocking."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.socket, self.deadline = sock, time.monotonic() + GREETING_S
        self.hello = b""

    def advance(self) -> bool:
        """Read the bytes that have arrived; return whether more must follow. Raises OSError."""
        try:
            data = self.socket.recv(HELLO.size - len(self.hello))
        except BlockingIOError:
            return True
        self.hello += data
        return bool(data) and len(self.hello) < HELLO.size

    def name(self, secret: str) -> str | None:
        """The caller's name; None where the greeting is incomplete or its secret is wrong."""
        if len(self.hello) < HELLO.size:
            return None
        digest, name = HELLO.unpack(self.hello)
        if not hmac.compare_digest(digest, _digest(secret)):
            return None
        # The sender cuts the name after 96 bytes, possibly within a UTF-8 sequence.
        return name.rstrip(b"\0").decode(errors="replace")


class Exchange:
    """Accepts connections, and returns the messages of all callers one after another.

    Callers without the secret are disconnected. They cannot delay a caller that has greeted:
    greetings are read without blocking, each must end within ``GREETING_S``, and at most
    ``UNGREETED`` are open at once.
    """

    def __init__(self, host: str, secret: str, timeout_s: float) -> None:
        """Listen on a free port.

        Args:
            host: Address to listen on.
            secret: Secret that callers must send.
            timeout_s: Time limit of waiting for a request, and of each send and receive.
        """
        self.secret, self.timeout_s = secret, timeout_s
        self.waited_s = 0.0
        """Time spent so far waiting for requests."""
        self.greetings: dict[socket.socket, _Greeting] = {}
        """Sockets without a complete greeting, oldest first."""
        self.listening = socket.create_server((host, 0))
        # A caller may disconnect between select and accept; a blocking accept would then wait for
        # the next caller.
        self.listening.setblocking(False)
        self.address: tuple[str, int] = self.listening.getsockname()[:2]
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listening, selectors.EVENT_READ)

    def receive(self) -> tuple[Connection, Message]:
        """Return the next message of any caller that has greeted.

        Raises:
            ProcessLost: No such message began within ``timeout_s``, whatever other callers send
                meanwhile.
        """
        start = time.monotonic()
        while True:
            now = time.monotonic()
            for greeting in [g for g in self.greetings.values() if g.deadline <= now]:
                # The greeting may have arrived in time, while this process answered another caller.
                self._advance(greeting)
                if greeting.socket in self.greetings:
                    self._disconnect(greeting)
            deadline = min([start + self.timeout_s, *(g.deadline for g in self.greetings.values())])
            ready = self.selector.select(max(0.0, deadline - now))
            for key, _ in ready:
                if key.fileobj is self.listening:
                    self._accept()
                # _accept above may have dropped this greeting.
                elif isinstance(key.data, _Greeting) and key.fileobj in self.greetings:
                    self._advance(key.data)
            connection = next(
                (key.data for key, _ in ready if isinstance(key.data, Connection)), None
            )
            if connection is not None:
                self.waited_s += time.monotonic() - start
                return connection, connection.receive()
            if time.monotonic() - start >= self.timeout_s:
                self.waited_s += time.monotonic() - start
                raise ProcessLost(f"no request for {self.timeout_s:g} s (cluster.step_timeout_s)")

    def _accept(self) -> None:
        """Accept one connection; where too many have not greeted, disconnect the oldest of them."""
        try:
            sock, _ = self.listening.accept()
        except OSError:  # the caller disconnected, or no file descriptor is free
            return
        if len(self.greetings) >= UNGREETED:
            oldest = next(iter(self.greetings.values()))
            self._advance(oldest)
            if oldest.socket in self.greetings:
                self._disconnect(oldest)
        greeting = self.greetings[sock] = _Greeting(sock)
        self.selector.register(sock, selectors.EVENT_READ, greeting)

    def _advance(self, greeting: _Greeting) -> None:
        """Read more of a greeting; when it is complete, turn the socket into a connection."""
        try:
            if greeting.advance():
                return
        except OSError:
            return self._disconnect(greeting)
        name = greeting.name(self.secret)
        if name is None:
            return self._disconnect(greeting)
        del self.greetings[greeting.socket]
        connection = Connection(greeting.socket, name, self.timeout_s)
        self.selector.modify(greeting.socket, selectors.EVENT_READ, connection)

    def _disconnect(self, greeting: _Greeting) -> None:
        """Close a connection that has not greeted."""
        del self.greetings[greeting.socket]
        self.selector.unregister(greeting.socket)
        greeting.socket.close()

    def close(self) -> None:
        """Close all connections."""
        for key in list(self.selector.get_map().values()):
            self.selector.unregister(key.fileobj)
            if key.data is not None:
                key.data.socket.close()
        self.listening.close()
        self.selector.close()


def interface(host: str) -> str | None:
    """Return the network interface of this machine with IPv4 address ``host``, or None."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # the interface has no address
                request = struct.pack("256s", name.encode())
                reply = fcntl.ioctl(probe, SIOCGIFADDR, request)
                if socket.inet_ntoa(reply[20:24]) == host:
                    return name
    return None


# ----------------------------------------------------------------------------- requests and replies
class RequestHandler(Protocol):
    """What a ``Server`` calls for each request."""

    def handle(self, caller: str, request: Message) -> Message:
        """Return the reply to one request of the process named ``caller``."""
        ...

    def phase(self, method: str) -> str:
        """Return the phase of training that the CPU time of a request is counted in."""
        ...

    def close(self) -> None:
        """Release what the handler holds."""
        ...


class Server:
    """Replies to the requests of other processes, one after another."""

    def __init__(self, handler: RequestHandler, exchange: Exchange) -> None:
        self.handler, self.exchange = handler, exchange
        self.cpu_s: dict[str, float] = defaultdict(float)
        """Phase of training -> CPU seconds of its requests."""

    def serve(self, callers: int) -> None:
        """Reply to requests until ``callers`` callers have sent "done"."""
        while callers:
            connection, request = self.exchange.receive()
            if request.method == "done":
                callers -= 1
            else:
                start = time.process_time()
                connection.send(self.handler.handle(connection.peer, request))
                self.cpu_s[self.handler.phase(request.method)] += time.process_time() - start

    def close(self) -> None:
        """Close the handler and all connections."""
        self.handler.close()
        self.exchange.close()


class Client:
    """Sends requests to one ``Server``.

    Several objects share the connection; replies are sorted by their targets.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.targets = 0
        """Number of targets so far."""
        self._replies: dict[int, deque[Message]] = defaultdict(deque)

    def new_target(self) -> int:
        """Return a target number that no other object of this client has."""
        self.targets += 1
        return self.targets - 1

    def send(self, method: str, target: int, value: Value = None, **data: Any) -> None:
        """Send a request without waiting for its reply."""
        self.connection.send(Message(method, target, data, value))

    def receive(self, target: int) -> Message:
        """Wait for the next reply to ``target``; keep replies to other targets for them."""
        while not self._replies[target]:
            reply = self.connection.receive()
            self._replies[reply.target].append(reply)
        return self._replies[target].popleft()

    def request(self, method: str, target: int, value: Value = None, **data: Any) -> Message:
        """Send a request, and wait for its reply."""
        self.send(method, target, value, **data)
        return self.receive(target)

    def finish(self) -> None:
        """Notify the server, which counts these, that no request follows in this phase."""
        self.connection.send(Message("done"))


def serialize_state(state: Mapping[str, Any] | None) -> Tensor | None:
    """Return a state in the format of torch.save, uint8 [bytes]; None for None."""
    if state is None:
        return None
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def deserialize_state(data: Value) -> dict[str, Any]:
    """Return the state that ``serialize_state`` wrote, on the CPU, without unpickling code."""
    return torch.load(
        io.BytesIO(as_tensor(data).numpy().tobytes()), map_location="cpu", weights_only=True
    )


def as_tensor(value: Value) -> Tensor:
    """Return ``value``, which must be a tensor."""
    assert isinstance(value, Tensor)
    return value
