"""One record per request: into the metrics, and as one structured line into the access log."""

import logging

from gateway.metrics import Metrics
from gateway.openai.edge import RequestRecord

access_log = logging.getLogger("numaserve.access")


class Recorder:
    """The edge's `Observer`."""

    def __init__(self, metrics: Metrics, mode: str) -> None:
        self._metrics = metrics
        self._mode = mode

    def on_first_token(self, seconds: float) -> None:
        self._metrics.first_token(seconds)

    def on_tokens(self, gap_s: float, count: int) -> None:
        self._metrics.tokens(gap_s, count)

    def on_request(self, record: RequestRecord) -> None:
        self._metrics.ended(
            mode=record.mode or self._mode,
            replica_id=record.replica_id,
            code=record.code,
            duration_s=record.duration_s,
            prompt_tokens=record.prompt_tokens,
        )
        access_log.info(
            "request",
            extra={
                "id": record.request_id,
                "route": record.route,
                "replica": record.replica_id,
                "code": record.code,
                "outcome": record.outcome,
                "prompt_tokens": record.prompt_tokens,
                "cached_tokens": record.cached_tokens,
                "completion_tokens": record.completion_tokens,
                "ttft_s": None if record.ttft_s is None else round(record.ttft_s, 4),
                "duration_s": round(record.duration_s, 4),
                "finish": ",".join(record.finish_reasons),
            },
        )
