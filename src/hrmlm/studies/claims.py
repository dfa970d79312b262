"""Who works on which run: claims that several processes and machines can take in one shared directory, one each.

A claim is a file with its owner, touched every few seconds. On the owner's own machine it is stale when the process is
gone (one that is merely frozen keeps it); seen from elsewhere, when it has not been touched for STALE_SECONDS.
"""

import fcntl
import json
import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from hrmlm.files import write_atomic

BEAT_SECONDS = 10.0
STALE_SECONDS = 300.0


@cache
def this_place() -> str:
    """This machine, since it was started, and the set of process numbers that we see."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return "/".join(parts)


def started(process: int) -> str | None:
    """When a process of this machine started, in ticks, so that a number that is used again is not taken for it.

    None if it is gone; "" where the system does not tell.
    """
    if not Path("/proc/self/stat").exists():
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass
        return ""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


class Claims:
    """The claims of a study, in a directory."""

    def __init__(self, directory: Path, stale_seconds: float = STALE_SECONDS) -> None:
        self.directory, self.stale_seconds = directory, stale_seconds
        directory.mkdir(parents=True, exist_ok=True)

    def take(self, name: str) -> str | None:
        """A token if the claim is ours now, None if somebody else has it."""
        if self._is_held(name):  # without the lock: most often so
            return None
        with self._locked():
            if self._is_held(name):
                return None
            self._path(name).unlink(missing_ok=True)
            token = uuid.uuid4().hex
            partial = self.directory / f".new-{token}"
            partial.write_text(self._owner(token), encoding="utf-8")
            try:
                os.link(partial, self._path(name))  # fails if it exists, also where there are no locks
            except FileExistsError:
                return None
            finally:
                partial.unlink(missing_ok=True)
            return token

    def adopt(self, name: str, token: str) -> bool:
        """Make this process the owner of a claim that its parent took; False if the claim is no longer the token's."""
        with self._locked():
            if self._read(name).get("token") != token:
                return False
            write_atomic(self._path(name), self._owner(token))
            return True

    def beat(self, name: str, token: str) -> bool:
        """Show that the owner is alive; False if somebody else took the claim over."""
        try:
            if self._read(name).get("token") != token:
                return False
            os.utime(self._path(name))
        except OSError:
            return False
        return True

    def release(self, name: str, token: str) -> None:
        """Give the claim back, if it is still the token's."""
        with self._locked():
            if self._read(name).get("token") == token:
                self._path(name).unlink(missing_ok=True)

    def held(self) -> list[str]:
        """Names of the claims whose owners are alive."""
        return [path.stem for path in self.directory.glob("*.claim") if self._is_held(path.stem)]

    def _path(self, name: str) -> Path:
        return self.directory / f"{name}.claim"

    def _owner(self, token: str) -> str:
        process = os.getpid()
        owner = {"token": token, "place": this_place(), "process": process, "started": started(process)}
        return json.dumps(owner) + "\n"

    def _read(self, name: str) -> dict[str, Any]:
        try:
            owner = json.loads(self._path(name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return owner if isinstance(owner, dict) else {}

    def _is_held(self, name: str) -> bool:
        owner = self._read(name)
        if owner.get("place") == this_place() and isinstance(owner.get("process"), int):
            return started(owner["process"]) == owner.get("started")
        try:
            return self._now() - self._path(name).stat().st_mtime < self.stale_seconds
        except FileNotFoundError:
            return False

    def _now(self) -> float:
        """The time of the file system, which is not always that of this machine."""
        clock = self.directory / f".clock-{socket.gethostname()}-{os.getpid()}"
        try:
            clock.touch()
            now = clock.stat().st_mtime
            clock.unlink()
        except OSError:
            return time.time()
        return now

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Alone among the processes that share the directory; released by the system when a process is killed."""
        with open(self.directory / ".lock", "w") as file:
            with suppress(OSError):  # a file system without locks: os.link still lets one win
                fcntl.lockf(file, fcntl.LOCK_EX)
            yield
