"""The one process clients see: text, routing, supervision and metrics for all replicas."""
