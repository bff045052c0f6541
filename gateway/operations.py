"""The routes for operators and probes: /health, /ready, /metrics and /admin/status."""

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from gateway.control import Control
from gateway.metrics import Metrics


def router(control: Control, metrics: Metrics, status: Callable[[], dict[str, Any]]) -> APIRouter:
    """Return the routes; they read and change nothing."""
    routes = APIRouter()

    @routes.get("/health")
    async def health() -> dict[str, str]:
        """Answer as soon as the process serves."""
        return {"status": "ok"}

    @routes.get("/ready")
    async def ready(response: Response) -> dict[str, Any]:
        """Answer 200 when a request sent now would be served, 503 otherwise."""
        if control.ready:
            return {"status": "ready"}
        response.status_code = 503
        states = {name: replica.state.value for name, replica in control.replicas.items()}
        return {"status": "draining" if control.draining else "not ready", "replicas": states}

    @routes.get("/metrics")
    async def exposition() -> Response:
        return Response(metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    @routes.get("/admin/status")
    async def admin_status() -> dict[str, Any]:
        return status()

    return routes
