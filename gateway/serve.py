"""Run a server and the loops beside it as one, and end them in order.

The first SIGTERM or SIGINT drains: nothing new is accepted, what runs may finish for a bounded
time. The second one stops at once. Whatever loop fails ends the process.
"""

import asyncio
import logging
import signal
import socket
from asyncio import FIRST_COMPLETED
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn

log = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_CONFIGURATION = 2
EXIT_CUT_SHORT = 3
"""Stopped before every running request had finished."""

LAST_BYTES_S = 5
"""What responses get to leave the sockets once nothing runs any more, in seconds."""


class Server(uvicorn.Server):
    """uvicorn without its own idea of signals: it would raise them again after a clean stop."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class Shutdown:
    """What has been asked for, by signal or by the server itself."""

    def __init__(self, drain_timeout_s: float) -> None:
        self.drain_timeout_s = drain_timeout_s
        self.asked = asyncio.Event()
        self.now = asyncio.Event()
        self.code = EXIT_OK

    def listen(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.signalled)

    def signalled(self) -> None:
        if self.asked.is_set():
            self.now.set()
        self.asked.set()

    def fail(self, code: int) -> None:
        """Stop for a reason of our own; `code` becomes the process's exit code."""
        self.code = code
        self.now.set()
        self.asked.set()


async def serve(
    app: Callable[..., Any],
    listener: socket.socket,
    loops: Sequence[Coroutine[Any, Any, None]],
    shutdown: Shutdown,
    drain: Callable[[], Awaitable[None]],
) -> int:
    """Serve until told to stop; return the exit code.

    `drain` makes the application refuse what is new, and returns once nothing runs any more.
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=LAST_BYTES_S,
    )
    server = Server(config)
    shutdown.listen()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(loop) for loop in loops]
        tasks.append(group.create_task(_stop_server(server, shutdown, drain)))
        await server.serve(sockets=[listener])
        for task in tasks:
            task.cancel()
    return shutdown.code


async def _stop_server(
    server: Server, shutdown: Shutdown, drain: Callable[[], Awaitable[None]]
) -> None:
    """Wait for a reason to stop, let requests finish for a while, then end the server."""
    await shutdown.asked.wait()
    if not shutdown.now.is_set():
        log.info("stopping: running requests have %g s to finish", shutdown.drain_timeout_s)
    drained = asyncio.ensure_future(drain())
    at_once = asyncio.ensure_future(shutdown.now.wait())
    try:
        patience_s = shutdown.drain_timeout_s
        await asyncio.wait({drained, at_once}, timeout=patience_s, return_when=FIRST_COMPLETED)
        if not drained.done():
            server.force_exit = True
            shutdown.code = shutdown.code or EXIT_CUT_SHORT
            log.warning("stopped before every request had finished")
    finally:
        drained.cancel()
        at_once.cancel()
    server.should_exit = True
