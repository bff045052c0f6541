"""What the operator reads while the server starts: the plan, the memory, and where to connect."""

import socket

from rich.console import Console
from rich.table import Table

from gateway.app import Machine
from gateway.config import UpSettings
from replica.topology import format_cpu_list

GIB = 1024**3


def announce(settings: UpSettings, found: Machine, listener: socket.socket) -> None:
    """Print the plan and the memory it will take, before the memory is taken."""
    console = Console(stderr=True, highlight=False)
    gguf, need = found.gguf, found.need
    console.print(
        f"[bold]numaserve[/]  {found.model.id}: {gguf.architecture} {gguf.quantization}, "
        f"{need.weights_bytes / GIB:.2f} GiB"
    )
    console.print(f"  mode      {found.mode.value} ({found.mode_reason})")
    console.print(
        f"  memory    {need.total_bytes / GIB:.2f} GiB per replica: weights "
        f"{need.weights_bytes / GIB:.2f}, KV {need.kv_bytes / GIB:.2f} "
        f"({settings.parallel} x {settings.ctx} tokens, {settings.kv_type}), "
        f"buffers {(need.compute_bytes + need.output_bytes) / GIB:.2f}"
    )
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for column in ("  replica", "node", "computes on", "keeps house on"):
        table.add_column(column)
    for domain in found.domains:
        table.add_row(
            f"  replica-{domain.index}",
            ",".join(map(str, domain.nodes)) + (" (virtual)" if domain.virtual else ""),
            f"cpus {format_cpu_list(domain.compute_cpus)}",
            f"cpus {format_cpu_list(domain.housekeeping_cpus)}"
            if domain.housekeeping_cpus
            else "-",
        )
    console.print(table)
    for note in [*found.plan.notes, *([found.degraded] if found.degraded else [])]:
        console.print(f"  note      {note}")
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    console.print(f"  listening http://{shown}:{port}/v1  (ready when /ready answers 200)")
