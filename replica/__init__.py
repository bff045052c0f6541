"""One model on one NUMA node: knows tokens, never text, and never imports the gateway."""
