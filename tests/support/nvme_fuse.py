"""A file system that misbehaves: it answers the kernel's FUSE requests itself, in a process of its
own, from a script.

`failing_files(folder, {...})` mounts a directory of fixed files for the length of a `with`. Each
holds bytes that a reader can compute, and each may cut every transfer short, fail whatever touches
the bytes from an offset on, or be another file each time its name is looked up. Needs root and
/dev/fuse: FuseUnavailableError with the reason elsewhere.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

_IN_HEADER = struct.Struct("<IIQQIIII")
_OUT_HEADER = struct.Struct("<IiQ")
# of reads and writes: handle, offset, size, flags, lock owner, flags, padding
_TRANSFER = struct.Struct("<QQIIQII")
_ATTRIBUTES = struct.Struct("<QQQQQQIIIIIIIIII")
_DIRECT_IO = 1  # what is opened so passes short transfers on, and no page cache hides them
_SIZE_IS_SET = 1 << 3
_ROOT = 1
_FOREVER_S = 3600
_MOST_BYTES = 128 << 10  # that the kernel sends or asks at once


class FuseUnavailableError(Exception):
    """No file system can be mounted here; the text says why."""


class DirectIO(Enum):
    """What a file system lets the kernel do with direct I/O: its answer to FUSE_ASYNC_DIO."""

    ASYNCHRONOUS = 1 << 15  # as libfuse asks for
    # Linux 6.18's io_uring then reads the rest of a short read from its start, but in its workers
    SYNCHRONOUS = 0


class Identity(str, Enum):
    """Which file a name is."""

    KEPT = "kept"
    # another at each look-up, as if something else were renamed to it all the time
    REPLACED = "replaced"


@dataclass(frozen=True)
class Behaviour:
    """What a file of `nbytes` does: transfers of at most `longest` bytes, an `error` from offset
    `fails_from` on.
    """

    nbytes: int
    longest: int = 1 << 30
    fails_from: int = 1 << 62
    error: int = errno.EIO
    identity: Identity = Identity.KEPT


def byte_pattern(nbytes: int) -> bytes:
    """Return what a file of that length holds at first."""
    return (bytes(range(251)) * (nbytes // 251 + 1))[:nbytes]


@contextmanager
def failing_files(
    folder: Path, behaviours: Mapping[str, Behaviour], direct_io: DirectIO = DirectIO.ASYNCHRONOUS
) -> Iterator[Path]:
    """Yield a directory that holds a file of each name."""
    if os.geteuid() != 0:
        raise FuseUnavailableError("mounting needs root")
    if not Path("/dev/fuse").exists():
        raise FuseUnavailableError("there is no /dev/fuse")
    mount_point = folder / "fuse"
    mount_point.mkdir()
    told = json.dumps({name: asdict(behaviour) for name, behaviour in behaviours.items()})
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve()), str(mount_point), told, direct_io.name],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    try:
        if server.stdout.readline() != "ready\n":
            raise FuseUnavailableError(server.communicate(timeout=10)[1].strip().splitlines()[-1])
        yield mount_point
    finally:
        subprocess.run(
            ["umount", "--lazy", str(mount_point)], capture_output=True, check=False, timeout=60
        )
        server.communicate(timeout=60)


class _Server:
    """Answers requests until the file system is unmounted.

    Node 1 is the directory, the files follow.
    """

    def __init__(
        self, device: int, behaviours: Mapping[str, Behaviour], direct_io: DirectIO
    ) -> None:
        self.device = device
        self.direct_io = direct_io
        self.names = {name: _ROOT + 1 + place for place, name in enumerate(behaviours)}
        self.behaviours = {self.names[name]: behaviour for name, behaviour in behaviours.items()}
        self.contents = {
            node: bytearray(byte_pattern(one.nbytes)) for node, one in self.behaviours.items()
        }
        self.answers: dict[int, Callable[[int, bytes], bytes]] = {
            1: self.look_up,
            3: lambda node, _: struct.pack("<QII", _FOREVER_S, 0, 0) + self.attributes(node),
            4: self.set_attributes,
            14: lambda _, __: struct.pack("<QII", 0, _DIRECT_IO, 0),
            15: self.read,
            16: self.write,
            18: lambda _, __: b"",  # release
            20: lambda _, __: b"",  # fsync
            25: lambda _, __: b"",  # flush
            26: self.initialise,
            27: lambda _, __: struct.pack("<QII", 0, 0, 0),  # opening the directory
            29: lambda _, __: b"",  # and closing it
        }

    def serve(self) -> None:
        """Answer until unmounted."""
        unanswered = (2, 36, 42)  # forget, interrupt, forget many
        while True:
            try:
                request = os.read(self.device, _MOST_BYTES + 65536)
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return
                if error.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                    continue
                raise
            _, opcode, unique, node, *_ = _IN_HEADER.unpack_from(request)
            if opcode not in unanswered:
                self.answer(opcode, unique, node, request[_IN_HEADER.size :])

    def answer(self, opcode: int, unique: int, node: int, body: bytes) -> None:
        """Answer one request; what is not known is ENOSYS."""
        code, payload = 0, b""
        try:
            if opcode not in self.answers:
                raise OSError(errno.ENOSYS, "not known")
            payload = self.answers[opcode](node, body)
        except OSError as error:
            code = -(error.errno or errno.EIO)
        os.write(
            self.device, _OUT_HEADER.pack(_OUT_HEADER.size + len(payload), code, unique) + payload
        )

    def initialise(self, _: int, body: bytes) -> bytes:
        major, minor = struct.unpack_from("<II", body)
        return struct.pack(
            "<IIIIHHIIHHI28x",
            min(major, 7),
            min(minor, 31),
            0,
            self.direct_io.value,
            16,
            12,
            _MOST_BYTES,
            1,
            0,
            0,
            0,
        )

    def look_up(self, _: int, body: bytes) -> bytes:
        name = body.rstrip(b"\0").decode()
        if name not in self.names:
            raise OSError(errno.ENOENT, "no such file")
        node, valid_s = self.names[name], _FOREVER_S
        if self.behaviours[node].identity is Identity.REPLACED:
            old, node, valid_s = node, max(self.behaviours) + 1, 0
            self.names[name] = node
            self.behaviours[node], self.contents[node] = self.behaviours[old], self.contents[old]
        return struct.pack("<QQQQII", node, 0, valid_s, 0, 0, 0) + self.attributes(node)

    def attributes(self, node: int) -> bytes:
        directory = node == _ROOT
        nbytes = 0 if directory else len(self.contents[node])
        mode = stat.S_IFDIR | 0o755 if directory else stat.S_IFREG | 0o666
        return _ATTRIBUTES.pack(
            node, nbytes, nbytes // 512 + 1, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0
        )

    def set_attributes(self, node: int, body: bytes) -> bytes:
        valid, _, _, nbytes = struct.unpack_from("<IIQQ", body)
        if valid & _SIZE_IS_SET:
            content = self.contents[node]
            content[:] = content[:nbytes].ljust(nbytes, b"\0")
        return struct.pack("<QII", 0, 0, 0) + self.attributes(node)

    def read(self, node: int, body: bytes) -> bytes:
        _, offset, nbytes, *_ = _TRANSFER.unpack_from(body)
        allowed = self.allowed(node, offset, nbytes)
        return bytes(self.contents[node][offset : offset + allowed])

    def write(self, node: int, body: bytes) -> bytes:
        _, offset, nbytes, *_ = _TRANSFER.unpack_from(body)
        allowed = self.allowed(node, offset, nbytes)
        content = self.contents[node]
        content.extend(bytes(max(0, offset - len(content))))
        content[offset : offset + allowed] = body[_TRANSFER.size : _TRANSFER.size + allowed]
        return struct.pack("<II", allowed, 0)

    def allowed(self, node: int, offset: int, nbytes: int) -> int:
        """Return how much of a transfer is done, or raise the error that the file is to give."""
        behaviour = self.behaviours[node]
        if offset + nbytes > behaviour.fails_from:
            raise OSError(behaviour.error, "as the test wants it")
        return min(nbytes, behaviour.longest)


def main() -> None:
    """Mount on the first argument the files that the second describes, and serve them."""
    mount_point, told, direct_io = sys.argv[1:]
    behaviours = {
        name: Behaviour(**{**fields, "identity": Identity(fields["identity"])})
        for name, fields in json.loads(told).items()
    }
    device = os.open("/dev/fuse", os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    if (
        libc.mount(b"failing", mount_point.encode(), b"fuse.failing", ctypes.c_ulong(0), options)
        != 0
    ):
        code = ctypes.get_errno()
        raise OSError(code, f"mount: {os.strerror(code)}", mount_point)
    print("ready", flush=True)
    _Server(device, behaviours, DirectIO[direct_io]).serve()


if __name__ == "__main__":
    main()
