"""A replica process: config, bind, load, serve. Normally started by the supervisor, under numactl.

Exit codes: 0 drained; 1 the engine died, or its address is taken; 2 a setting or the model is
wrong, so that starting again would not help; 3 stopped before everything had finished.
"""

import asyncio
import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection
from typing import NoReturn

import click

from replica.binding import BindingError, memory_locality, move_thread
from replica.blocks import BLOCK_TOKENS, hash_root
from replica.config import ConfigError, ReplicaSettings, load, options, read_secret
from replica.engine import Engine, StepResult
from replica.gguf_file import ModelFileError, read_gguf
from replica.kv_store import KvStore
from replica.kv_streams import KvStreams
from replica.limits import Limits
from replica.llama import Llama, LlamaOptions, ModelLoadError
from replica.logs import configure
from replica.measure import best_threads, measure
from replica.scheduler import Scheduler
from replica.server import ListenError, ReplicaServer
from replica.snapshots import ReplicaSnapshots
from replica.threads import ThreadTuner
from replica.wire import Drain, Facts

log = logging.getLogger("replica")

EXIT_ENGINE_DIED = 1
EXIT_CONFIGURATION = 2
EXIT_CUT_SHORT = 3

SWITCH_INTERVAL_S = 2e-4
"""Python's default of 5 ms lets the event loop hold up every return from llama.cpp."""
SHARED_CHUNK_TOKENS_MAX = 128
WAITING_MAX = 64
PR_SET_PDEATHSIG = 1


@click.command(context_settings={"show_default": False})
@options(ReplicaSettings)
def main(**given: object) -> None:
    """Hold one model on one NUMA node and compute for a gateway.

    Speaks tokens over a WebSocket at /wire; /health and /status answer plain GETs.
    """
    try:
        settings = load(ReplicaSettings, given)
        configure(settings.log_format, process=settings.replica_id)
        secret = _secret(settings)
    except ConfigError as error:
        sys.stderr.write(f"numaserve replica: {error}\n")
        sys.exit(EXIT_CONFIGURATION)
    if settings.parent_pid is not None:
        _die_with(settings.parent_pid)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    sys.exit(asyncio.run(_serve_or_say(settings, secret)))


async def _serve_or_say(settings: ReplicaSettings, secret: str | None) -> int:
    """Serve; what the operator could mend ends in one line and not in a traceback."""
    try:
        return await _serve(settings, secret)
    except BindingError as error:
        log.error("%s", error)  # noqa: TRY400  # the sentence is for the operator
        return EXIT_CONFIGURATION
    except ListenError as error:
        log.error("%s", error)  # noqa: TRY400
        return EXIT_ENGINE_DIED


async def _serve(settings: ReplicaSettings, secret: str | None) -> int:
    """Load on the engine's thread, serve on this one; return the exit code."""
    loop = asyncio.get_running_loop()
    server = ReplicaServer(secret)
    stop = _Stop()
    engine_ended: asyncio.Future[int] = loop.create_future()

    def tell(function: Callable[..., None], *arguments: object) -> None:
        loop.call_soon_threadsafe(_or_die, function, *arguments)

    cpus = settings.cpus or os.sched_getaffinity(0)  # what numactl gave this process

    def engine_thread() -> None:
        code = _run_engine(settings, cpus, server, stop, tell)
        tell(engine_ended.set_result, code)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.signal)
    async with server.listen(settings.listen):
        # Each thread moves to its own CPUs: to start with, one has those of whoever started it.
        move_thread(settings.housekeeping_cpus)
        threading.Thread(target=engine_thread, name="engine", daemon=True).start()
        return await engine_ended


def _or_die(function: Callable[..., None], *arguments: object) -> None:
    """Call a function that must not fail: with one step untold, the gateway's picture is wrong."""
    try:
        function(*arguments)
    except BaseException:
        log.exception("a step could not be passed on")
        _die()


def _die() -> NoReturn:
    """End the process at once, from any thread."""
    logging.shutdown()
    os._exit(EXIT_ENGINE_DIED)


class _Stop:
    """What a signal does: the first drains, the second ends the process."""

    def __init__(self) -> None:
        self.asked = False
        self.engine: Engine | None = None

    def signal(self) -> None:
        if self.asked or self.engine is None:
            os._exit(EXIT_CUT_SHORT if self.asked else 0)
        self.asked = True
        self.engine.send(Drain())


def _run_engine(
    settings: ReplicaSettings,
    cpus: Collection[int],
    server: ReplicaServer,
    stop: _Stop,
    tell: Callable[..., None],
) -> int:
    """Be the engine's thread: load the model, run the loop until it is drained."""
    try:
        move_thread(cpus)
        llama, engine, facts = _build(settings, lambda result: tell(server.publish, result))
        stop.engine = engine
        tell(server.ready, engine, facts)
        log.info("%s is ready on nodes %s, cpus %s", facts.replica_id, settings.nodes, facts.cpus)
        engine.run()
        llama.close()
    except (BindingError, ModelFileError, ModelLoadError) as error:
        log.error("%s", error)  # noqa: TRY400  # the sentence is for the operator
        return EXIT_CONFIGURATION
    except BaseException:
        # Nobody may think this replica healthy because its event loop still answers.
        log.exception("the engine died")
        _die()
    return 0


def _build(
    settings: ReplicaSettings, publish: Callable[[StepResult], None]
) -> tuple[Llama, Engine, Facts]:
    """Load the model and join the parts around it."""
    fingerprint = settings.fingerprint or read_gguf(settings.model).fingerprint
    cpus = sorted(os.sched_getaffinity(0))
    threads = len(cpus)
    root = hash_root(fingerprint)
    snapshots = _snapshots(settings, fingerprint, root)
    options = LlamaOptions(
        path=settings.model,
        context_tokens=settings.ctx,
        parallel=settings.parallel,
        threads=threads,
        kv_type=settings.kv_type,
    )
    llama = Llama(options, snapshots)
    kv_streams = KvStreams(
        settings.parallel,
        BLOCK_TOKENS,
        root,
        trimmable=llama.trimmable,
        copies_prefixes=llama.copies_prefixes,
    )
    limits = Limits(
        context_tokens=settings.ctx,
        vocab_tokens=llama.vocab_tokens,
        batch_tokens_max=llama.batch_tokens_max,
        shared_chunk_tokens_max=SHARED_CHUNK_TOKENS_MAX,
        waiting_max=WAITING_MAX,
        gap_max_s=None if settings.max_itl_ms is None else settings.max_itl_ms / 1000,
        guess=settings.speculation == "auto",
    )
    pace = tuner = None
    if llama.trimmable:  # otherwise nothing can be tried without a trace
        if settings.threads is None:
            most = len(settings.cpus or cpus)
            threads = best_threads(most, llama.set_threads, llama.try_step, llama.try_prompt)
            tuner = ThreadTuner(threads)
        pace = measure(llama.try_step, llama.try_prompt, settings.parallel)
    scheduler = Scheduler(kv_streams, limits, llama.end_token_ids, pace, snapshots)
    engine = Engine(llama, scheduler, kv_streams, publish, tuner)
    return llama, engine, _facts(settings, fingerprint, cpus, threads)


def _snapshots(settings: ReplicaSettings, fingerprint: str, root: int) -> ReplicaSnapshots | None:
    """Join the store, if there is one. Its states fit contexts made like ours alone."""
    if settings.kv_store_fd is None:
        return None
    namespace = hash_root(fingerprint, settings.kv_type, str(settings.parallel))
    return ReplicaSnapshots(KvStore.attach(settings.kv_store_fd), namespace, root, BLOCK_TOKENS)


def _facts(settings: ReplicaSettings, fingerprint: str, cpus: list[int], threads: int) -> Facts:
    """Measure where the memory really lies, and say what must be known of this replica."""
    locality = memory_locality(settings.nodes)
    ratio = locality.ratio
    refusal = None
    if ratio is not None and ratio < settings.min_local_ratio:
        refusal = (
            f"only {ratio:.1%} of this replica's memory lies on node {settings.nodes}, "
            f"{settings.min_local_ratio:.1%} is wanted: free memory on that node, or accept less "
            "with --min-local-ratio"
        )
        log.error("%s", refusal)
    return Facts(
        replica_id=settings.replica_id,
        node=settings.nodes[0],
        pid=os.getpid(),
        cpus=cpus,
        threads=threads,
        model_fingerprint=fingerprint,
        context_tokens=settings.ctx,
        parallel=settings.parallel,
        block_tokens=BLOCK_TOKENS,
        memory_local_ratio=ratio,
        degraded=settings.degraded or None,
        refusal=refusal,
    )


def _secret(settings: ReplicaSettings) -> str | None:
    """Read the shared secret; over TCP there must be one."""
    if settings.secret_file is None:
        if settings.listen.startswith("tcp:"):
            raise ConfigError("--listen tcp:… needs --secret-file: anyone could connect otherwise")
        return None
    return read_secret(settings.secret_file)


def _die_with(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent ends, also by kill -9."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it was gone before we asked
        sys.exit(EXIT_CUT_SHORT)


if __name__ == "__main__":
    main()
