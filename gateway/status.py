"""`/admin/status`: what the gateway knows of itself, as JSON and as a table."""

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gateway.control import Control, Replica
from gateway.dispatch import Dispatcher
from gateway.modes import Mode
from gateway.proxy import Proxy
from gateway.supervisor import Supervisor
from replica.kv_store import KvStore
from replica.topology import format_cpu_list

STATE_STYLES = {"ready": "green", "starting": "yellow", "refused": "red", "failed": "red"}


def status(
    mode: tuple[Mode, str],
    control: Control,
    dispatcher: Dispatcher,
    proxy: Proxy,
    supervisor: Supervisor,
) -> dict[str, Any]:
    """Return the document of DESIGN's contract; what is not known is null, never zero."""
    return {
        "mode": mode[0].value,
        "mode_reason": mode[1],
        "concurrency": dispatcher.running + dispatcher.queued,
        "waiting": dispatcher.queued,
        "crossover": None,
        "profile": None,
        "draining": control.draining,
        "recoveries": proxy.recoveries,
        "replicas": [
            _replica(replica, dispatcher, supervisor.pid(name), supervisor.restarts.get(name, 0))
            for name, replica in control.replicas.items()
        ],
        "power": None,
    }


def store_status(store: KvStore | None) -> dict[str, Any] | None:
    """Return the part of the document that tells of the snapshot store."""
    if store is None:
        return None
    stats = store.stats()
    return {
        "bytes": stats.bytes_used,
        "budget_bytes": stats.budget_bytes,
        "snapshots": stats.snapshots,
        "evictions": stats.evictions,
    }


def _replica(
    replica: Replica, dispatcher: Dispatcher, pid: int | None, restarts: int
) -> dict[str, Any]:
    facts = replica.facts
    return {
        "id": replica.replica_id,
        "node": replica.node,
        "state": replica.state.value,
        "reason": replica.reason or None,
        "phase": replica.phase.value if facts else None,
        "pid": facts.pid if facts else pid,
        "cpus": facts.cpus if facts else None,
        "threads": facts.threads if facts else None,
        "running": dispatcher.inflight(replica.replica_id),
        "waiting": replica.load.waiting,
        "kv_used_tokens": replica.load.kv_used_tokens,
        "kv_capacity_tokens": facts.parallel * facts.context_tokens if facts else None,
        "memory_local_ratio": facts.memory_local_ratio if facts else None,
        "degraded": facts.degraded if facts else None,
        "restarts": restarts,
    }


def render(document: dict[str, Any]) -> RenderableType:
    """Draw a status document for a terminal."""
    head = Text.assemble(
        ("mode ", "dim"),
        (document["mode"], "bold"),
        f" ({document['mode_reason']})   ",
        ("concurrency ", "dim"),
        f"{document['concurrency']}, {document['waiting']} waiting",
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("replica", "node", "state", "pid", "cpus"):
        table.add_column(column)
    for column in ("running", "kv tokens", "local", "restarts"):
        table.add_column(column, justify="right")
    notes = []
    for row in document["replicas"]:
        style = STATE_STYLES[row["state"]]
        local = row["memory_local_ratio"]
        table.add_row(
            row["id"],
            str(row["node"]),
            Text(row["state"], style),
            str(row["pid"] or "-"),
            format_cpu_list(row["cpus"]) if row["cpus"] else "-",
            str(row["running"]),
            f"{row['kv_used_tokens']}/{row['kv_capacity_tokens'] or '-'}",
            "-" if local is None else f"{local:.1%}",
            str(row["restarts"]),
        )
        notes += [
            Text(f"{row['id']}: {row[key]}", style="yellow")
            for key in ("reason", "degraded")
            if row[key]
        ]
    return Group(head, table, *notes)
