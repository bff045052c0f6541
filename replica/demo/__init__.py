"""The demo model: its corpus, its training, its conversion to GGUF and its evaluation."""
