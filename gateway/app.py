"""Build every object of the gateway and join them: the one file that knows them all.

`machine` prepares what `numaserve up` needs to know of this machine and model, before anything
starts and in a second or two; `run_up` and `run_gateway` then serve.
"""

import logging
import os
import socket
import sys
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI

from gateway import operations
from gateway.config import (
    MIB,
    EdgeSettings,
    GatewaySettings,
    UpSettings,
    read_keys,
    runtime_base,
)
from gateway.control import Control
from gateway.dispatch import Dispatcher
from gateway.link import Address, ReplicaLink
from gateway.metrics import LiveCollector, Metrics
from gateway.model_source import ResolvedModel, resolve_model
from gateway.modes import Mode, choose, domains_of
from gateway.openai.auth import ApiKeys
from gateway.openai.edge import Edge, EdgeLimits
from gateway.openai.routes import install
from gateway.openai.template import ChatTemplate
from gateway.prefix_index import PrefixIndex
from gateway.proxy import Proxy
from gateway.recorder import Recorder
from gateway.routing import least_loaded
from gateway.runtime_dir import runtime_dir
from gateway.serve import EXIT_FAILED, Shutdown, serve
from gateway.status import status, store_status
from gateway.supervisor import Command, Supervisor
from replica.binding import move_thread, probe_membind
from replica.blocks import hash_root
from replica.config import ModelSettings, arguments, child_environment, read_secret
from replica.gguf_file import GgufFile, read_gguf
from replica.kv_store import KvStore
from replica.memory import MemoryNeed, check_fit, predict_memory
from replica.placement import PlacementDomain, Plan, numactl_argv, plan
from replica.topology import Topology, read_topology
from replica.vocab import Vocab

log = logging.getLogger(__name__)

HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""glibc then advises huge pages for what malloc maps. Measured with a 0.5B model: a step of one
row took 7.5 instead of 8.5 ms, prompts were read 10 % faster, and loading took 0.4 s longer."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What `numaserve up` has found out before it starts anything."""

    topology: Topology
    plan: Plan
    mode: Mode
    mode_reason: str
    domains: tuple[PlacementDomain, ...]
    model: ResolvedModel
    gguf: GgufFile
    need: MemoryNeed
    degraded: str | None
    """Why memory cannot be bound here, in a sentence."""
    keys: frozenset[str]


@dataclass(frozen=True, slots=True)
class Site:
    """What a gateway stands in front of."""

    model: ResolvedModel
    gguf: GgufFile
    mode: Mode
    mode_reason: str
    replicas: tuple[tuple[str, int, Address], ...]
    """Name, node and address of each."""
    context_tokens: int
    keys: frozenset[str]
    store: KvStore | None = None
    """Where the replicas keep KV snapshots, if they are ours."""


@dataclass(frozen=True, slots=True)
class Parts:
    """One gateway's objects."""

    app: Callable[..., Any]
    control: Control
    proxy: Proxy
    supervisor: Supervisor
    links: tuple[ReplicaLink, ...]


def machine(settings: UpSettings) -> Machine:
    """Read the model and the machine, and refuse what cannot work."""
    keys = read_keys(settings.api_key_file)
    topology = read_topology()
    planned = plan(
        topology,
        nodes=settings.nodes,
        domain=settings.domain,
        virtual_nodes=settings.virtual_nodes,
        threads=settings.threads,
    )
    mode, reason = choose(settings.mode, len(planned.domains))
    domains = tuple(domains_of(mode, planned.domains))
    model = resolve_model(settings.model)
    gguf = read_gguf(model.path)
    need = predict_memory(
        gguf,
        context_tokens=settings.ctx,
        parallel=settings.parallel,
        kv_type=settings.kv_type,
    )
    _check_memory(topology, domains, need)
    degraded = next(filter(None, (probe_membind(domain.nodes) for domain in domains)), None)
    return Machine(topology, planned, mode, reason, domains, model, gguf, need, degraded, keys)


async def run_up(settings: UpSettings, found: Machine, listener: socket.socket) -> int:
    """Serve with replicas of our own until told to stop; return the exit code."""
    move_thread(found.plan.gateway_cpus)
    with runtime_dir(runtime_base()) as directory, _store(settings) as store:
        replicas = tuple(
            (name, domain.nodes[0], Address(f"unix:{directory / name}.sock"))
            for domain in found.domains
            for name in [f"replica-{domain.index}"]
        )
        site = Site(
            model=found.model,
            gguf=found.gguf,
            mode=found.mode,
            mode_reason=found.mode_reason,
            replicas=replicas,
            context_tokens=settings.ctx,
            keys=found.keys,
            store=store,
        )
        parts = _assemble(settings, site)
        commands = [
            _command(settings, found, domain, name, address, store)
            for domain, (name, _, address) in zip(found.domains, replicas, strict=True)
        ]
        loops = [parts.supervisor.run(command) for command in commands]
        shutdown = Shutdown(settings.drain_timeout)
        loops.append(_fail_when_hopeless(parts.control, shutdown))
        return await _serve(parts, listener, loops, shutdown)


async def run_gateway(settings: GatewaySettings, listener: socket.socket) -> int:
    """Serve with replicas that others started; return the exit code."""
    keys = read_keys(settings.api_key_file)
    secret = read_secret(settings.secret_file) if settings.secret_file else None
    model = resolve_model(settings.model)
    replicas = tuple(
        (f"replica-{index}", index, Address(url, secret))
        for index, url in enumerate(settings.replica)
    )
    mode, _ = choose("auto", len(replicas))
    reason = f"{len(replicas)} replicas were named"
    site = Site(
        model=model,
        gguf=read_gguf(model.path),
        mode=mode,
        mode_reason=reason,
        replicas=replicas,
        context_tokens=settings.ctx,
        keys=keys,
    )
    parts = _assemble(settings, site)
    return await _serve(parts, listener, [], Shutdown(settings.drain_timeout))


def _check_memory(topology: Topology, domains: Sequence[PlacementDomain], need: MemoryNeed) -> None:
    """Refuse a model that does not fit; domains on the same memory have to share it."""
    tenants: dict[tuple[int, ...], int] = {}
    for domain in domains:
        tenants[domain.nodes] = tenants.get(domain.nodes, 0) + 1
    free = {node.id: node.memory_free_bytes for node in topology.nodes}
    for nodes, count in tenants.items():
        label = f"node {', '.join(map(str, nodes))}"
        if count > 1:
            label += f" (shared by {count} replicas)"
        check_fit(need, sum(free[node] for node in nodes) // count, label)


@contextmanager
def _store(settings: UpSettings) -> Generator[KvStore | None]:
    """Hold the snapshot store open: memory without a name, gone with its last holder."""
    if settings.kv_store_mib == 0:
        yield None
        return
    with KvStore.create(settings.kv_store_mib * MIB) as store:
        yield store


def _command(  # noqa: PLR0913, PLR0917  # all that is known when a replica is started
    settings: UpSettings,
    found: Machine,
    domain: PlacementDomain,
    name: str,
    address: Address,
    store: KvStore | None,
) -> Command:
    """Say how one replica is started: under numactl, with everything decided for it."""
    wishes: dict[str, object] = {
        "model": found.gguf.path,
        "listen": address.url,
        "replica_id": name,
        "fingerprint": found.gguf.fingerprint,
        "nodes": domain.nodes,
        "cpus": domain.compute_cpus,
        "threads": settings.threads,
        "housekeeping_cpus": domain.housekeeping_cpus,
        "degraded": found.degraded or "",
        "parent_pid": os.getpid(),
        "kv_store_fd": store.fileno() if store else None,
        **{field: getattr(settings, field) for field in ModelSettings.model_fields},
    }
    argv = numactl_argv(domain, bind_memory=found.degraded is None)
    argv += [sys.executable, "-P", "-m", "replica", *arguments(wishes)]  # -P: ours, not cwd's
    environment = child_environment(**(HUGE_PAGES if settings.huge_pages else {}))
    inherits = (store.fileno(),) if store else ()
    return Command(name, argv, environment, inherits)


def _assemble(settings: EdgeSettings, site: Site) -> Parts:
    """Build the objects and join them."""
    vocab = Vocab.load(site.gguf.path)
    prefix_index = PrefixIndex()
    dispatcher = Dispatcher(least_loaded, prefix_index, settings.queue_max)
    control = Control(
        [(name, node) for name, node, _ in site.replicas],
        dispatcher,
        prefix_index,
        site.gguf.fingerprint,
        site.context_tokens,
    )
    supervisor = Supervisor(control)
    links = tuple(
        ReplicaLink(name, address, control, settings.silence_max)
        for name, _, address in site.replicas
    )
    metrics = Metrics()
    metrics.registry.register(LiveCollector(control, dispatcher, site.mode, site.store))
    proxy = Proxy(
        dispatcher,
        {link.replica_id: link for link in links},
        metrics,
        root=hash_root(site.gguf.fingerprint),
        mode=lambda: site.mode.value,
        hopeless=lambda: control.hopeless,
        queue_timeout_s=settings.queue_timeout,
    )
    control.wake = proxy.wake
    control.count_cached = metrics.cached
    control.end_process = supervisor.kill
    edge = _edge(settings, site, vocab, proxy, Recorder(metrics, site.mode.value))
    routes = operations.router(
        control,
        metrics,
        lambda: (
            status((site.mode, site.mode_reason), control, dispatcher, proxy, supervisor)
            | {"kv_store": store_status(site.store)}
        ),
    )
    app = FastAPI(title="numaserve", docs_url="/docs", redoc_url=None)
    app.include_router(routes)
    install(app, edge)
    app.add_middleware(ApiKeys, keys=site.keys)
    return Parts(app, control, proxy, supervisor, links)


def _edge(
    settings: EdgeSettings, site: Site, vocab: Vocab, proxy: Proxy, recorder: Recorder
) -> Edge:
    return Edge(
        generator=proxy,
        vocab=vocab,
        template=ChatTemplate(
            vocab.chat_template, bos=vocab.bos, eos=vocab.eos, tool_source=vocab.tool_template
        ),
        model_id=site.model.id,
        fingerprint=site.gguf.fingerprint,
        created=int(site.gguf.path.stat().st_mtime),
        context_tokens=site.context_tokens,
        observe=recorder,
        limits=EdgeLimits(
            body_bytes_max=settings.body_max, request_timeout_s=settings.request_timeout
        ),
    )


async def _serve(
    parts: Parts,
    listener: socket.socket,
    loops: Sequence[Coroutine[Any, Any, None]],
    shutdown: Shutdown,
) -> int:
    """Run everything until told to stop; return the exit code."""

    async def drain() -> None:
        parts.control.draining = parts.proxy.draining = True
        await parts.proxy.idle()

    loops = [*(link.run() for link in parts.links), *loops]
    return await serve(parts.app, listener, loops, shutdown, drain)


async def _fail_when_hopeless(control: Control, shutdown: Shutdown) -> None:
    """End the server when every replica has failed for good: nothing can bring one back."""
    await control.all_failed.wait()
    log.error("every replica has failed for good; stopping")
    shutdown.fail(EXIT_FAILED)
