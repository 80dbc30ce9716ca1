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
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from embodied_envs.base.errors import ProcessLost
from embodied_ppo.training.checkpoint import to_bytes

# A tensor, None, or a dictionary of values, nested to any depth.
Value = Tensor | dict[str, Any] | None

ALIGN = 16  # alignment of each tensor in the payload, bytes
# Greeting: SHA-256 of the secret, caller's name; nothing is parsed before it is verified.
HELLO = struct.Struct("<32s96s")
# Size of the JSON header and size of the tensor payload, bytes.
PREFIX = struct.Struct("<QQ")
GREETING_S = 5.0  # time limit of waiting for a caller's greeting, seconds
BUFFER = 4 << 20  # Socket buffer, bytes. An action always fits, so that both ends may send at once.
SIOCGIFADDR = 0x8915  # Linux ioctl: the IPv4 address of a network interface


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

    # The header holds everything but the numbers of the tensors, which follow as raw bytes.
    value = structure(message.value)
    types = [[str(x.dtype).removeprefix("torch."), list(x.shape)] for x in leaves]
    header = json.dumps([message.method, message.target, message.data, value, types]).encode()
    chunks, payload_size = list[memoryview](), 0
    for x in leaves:
        if size := x.numel() * x.element_size():
            chunks.append(x.view(-1).view(torch.uint8).numpy().data)
            # Padding keeps every tensor aligned in the receiver's buffer.
            chunks.append(memoryview(bytes(-size % ALIGN)))
            payload_size += size + -size % ALIGN
    return [memoryview(PREFIX.pack(len(header), payload_size) + header), *chunks]


def unpack(header: bytes, payload: Tensor) -> Message:
    """Return the message that ``pack`` wrote.

    Args:
        header: JSON header, without the prefix.
        payload: uint8 [bytes]. The tensors of the message share its memory.
    """
    method, target, data, structure, types = json.loads(header)
    leaves = tensor_views(payload, types)

    def fill(x: Any) -> Value:
        if isinstance(x, Mapping):
            return {name: fill(inner) for name, inner in x.items()}
        return None if x is None else leaves[x]

    return Message(method, target, data, fill(structure))


def tensor_views(buffer: Tensor, types: Iterable[tuple[str, Sequence[int]]]) -> list[Tensor]:
    """Return the tensors in a buffer, uint8 [bytes], as views of its memory.

    Args:
        buffer: The bytes of the tensors, each from a multiple of ``ALIGN`` on.
        types: dtype and shape of each tensor, in order.
    """
    views, offset = list[Tensor](), 0
    for name, shape in types:
        dtype = getattr(torch, name)
        size = torch.Size(shape).numel() * dtype.itemsize
        views.append(buffer[offset : offset + size].view(dtype).view(shape))
        offset += size + -size % ALIGN
    return views


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
        self.waited_s = 0.0  # time spent so far waiting for a message to begin
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
                # Linux limits the number of buffers of one call; a call may also send a part only.
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
        header, payload = bytearray(header_size), torch.empty(payload_size, dtype=torch.uint8)
        self._read(memoryview(header))
        if payload_size:
            self._read(payload.numpy().data)
        return unpack(bytes(header), payload)

    def receive_greeting(self, secret: str) -> bool:
        """Read the greeting of a caller; return whether it has the secret."""
        hello = bytearray(HELLO.size)
        self._read(memoryview(hello))
        # Constant time, so that the time of an answer says nothing about the secret.
        digest, name = HELLO.unpack(hello)
        # The sender cuts the name after 96 bytes, possibly within a UTF-8 sequence.
        self.peer = name.rstrip(b"\0").decode(errors="replace")
        return hmac.compare_digest(digest, _digest(secret))

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
            limit = f"{self.timeout_s:g} s (cluster.step_timeout_s)"
            return ProcessLost(f"{self.peer}: no answer for {limit}")
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


class Exchange:
    """Accepts connections, and returns the messages of all callers one after another.

    Callers without the secret are disconnected, after ``GREETING_S`` if they send nothing.
    """

    def __init__(self, host: str, secret: str, timeout_s: float) -> None:
        """Listen on a free port.

        Args:
            host: Address to listen on.
            secret: Secret that callers must send.
            timeout_s: Time limit of waiting for a request, and of each send and receive.
        """
        self.secret, self.timeout_s = secret, timeout_s
        self.waited_s = 0.0  # time spent so far waiting for requests
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
            ProcessLost: No message began within ``timeout_s``.
        """
        start = time.monotonic()
        while (remaining_s := start + self.timeout_s - time.monotonic()) > 0:
            for key, _ in self.selector.select(remaining_s):
                if key.fileobj is self.listening:
                    self._accept()
                    continue
                # Reply to one request at a time; others stay in their sockets' buffers.
                self.waited_s += time.monotonic() - start
                return key.data, key.data.receive()
        self.waited_s += time.monotonic() - start
        raise ProcessLost(f"no request for {self.timeout_s:g} s (cluster.step_timeout_s)")

    def _accept(self) -> None:
        """Accept one connection, and close it if its caller does not know the secret."""
        try:
            sock, _ = self.listening.accept()
        except OSError:  # the caller disconnected, or no file descriptor is free
            return
        connection = Connection(sock, "a caller", GREETING_S)
        try:
            knows_secret = connection.receive_greeting(self.secret)
        except ProcessLost:
            knows_secret = False
        if not knows_secret:
            return connection.close()
        connection.timeout_s = self.timeout_s
        sock.settimeout(self.timeout_s)
        self.selector.register(sock, selectors.EVENT_READ, connection)

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
                reply = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
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


class Server:
    """Replies to the requests of other processes, one after another."""

    def __init__(self, handler: RequestHandler, exchange: Exchange) -> None:
        self.handler, self.exchange = handler, exchange
        # Phase of training -> CPU seconds of its requests.
        self.cpu_s: dict[str, float] = defaultdict(float)

    def serve(self, callers: int) -> None:
        """Reply to requests until ``callers`` callers have sent "done"."""
        while callers:
            # "done" ends the phase of one caller.
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
        self.targets = 0  # number of targets so far
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
            # Replies arrive in the order of the server; other objects' replies are kept for them.
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
    return torch.frombuffer(bytearray(to_bytes(state)), dtype=torch.uint8)


def deserialize_state(data: Value) -> dict[str, Any]:
    """Return the state that ``serialize_state`` wrote, on the CPU, without unpickling code."""
    return torch.load(
        io.BytesIO(as_tensor(data).numpy().tobytes()), map_location="cpu", weights_only=True
    )


def as_tensor(value: Value) -> Tensor:
    """Return ``value``, which must be a tensor."""
    assert isinstance(value, Tensor)
    return value
