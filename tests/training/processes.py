"""Several processes on this machine that train together, as torchrun would start them, without its start-up time."""

import multiprocessing
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed.checkpoint  # here once, and not in every process that is forked
import torch.distributed.fsdp  # noqa: F401

from hrmlm.parallel import Parallel

WITHIN = 150
"""Seconds after which processes that have not ended count as hanging."""

_FORK: Any = multiprocessing.get_context("fork")


def start(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Fork `size` processes that each run function(*arguments) in the environment of torchrun; they are running."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(size):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        process = _FORK.Process(target=_enter, args=(place, function, *arguments))
        process.start()
        processes.append(process)
    return processes


def _enter(place: dict[str, Any], function: Callable[..., Any], *arguments: Any) -> None:
    signal.alarm(WITHIN)
    os.environ.update({key: str(value) for key, value in place.items()})
    function(*arguments)


def codes(processes: list[Any]) -> list[int | None]:
    """Exit codes; negative: the signal that ended it, SIGALRM where it hung."""
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def run(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What function(parallel, *arguments) gives in each of `size` processes, by rank. All must end well."""
    pipes = [_FORK.Pipe(duplex=False) for _ in range(size)]

    def work() -> None:
        with Parallel.opened() as parallel, parallel.watched():
            pipes[parallel.rank][1].send(function(parallel, *arguments))

    processes = start(size, work)
    results = []
    for receiver, sender in pipes:
        sender.close()
        with suppress(EOFError):  # it failed
            results.append(receiver.recv())
    assert codes(processes) == [0] * size
    return results
