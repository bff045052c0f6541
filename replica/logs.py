"""How log lines look, in every process of this project: text for people, JSON for machines.

Everybody logs through the standard `logging`; this file only gives its root a handler.
"""

import logging
import sys
from typing import Literal

import structlog

LogFormat = Literal["text", "json"]


def configure(log_format: LogFormat, *, process: str) -> None:
    """Send everything from INFO up to stderr, each line marked with the process's name."""
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.ExtraAdder(),
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso", utc=log_format == "json"),
        lambda _logger, _method, event: {**event, "process": process},
    ]
    renderer: list[structlog.typing.Processor] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
        if log_format == "json"
        else [
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(),
                # The default one shows local variables: prompts, keys and secrets.
                exception_formatter=structlog.dev.plain_traceback,
            )
        ]
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.INFO)
    for noisy in ("websockets", "httpx", "httpcore", "uvicorn.error"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
