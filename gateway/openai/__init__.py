"""The public edge: OpenAI's HTTP surface on top of token streams."""
