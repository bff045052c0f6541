"""The network: a small Llama, computed exactly as llama.cpp computes the architecture `llama`.

Rotary pairs are neighbours (2i, 2i+1), the embedding is also the output, and each row is a multiple
of 32 wide so that it can be stored as Q8_0. This file knows tensors, and neither text nor files.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """The sizes of a model, under the names they have in a GGUF file."""

    vocabulary: int = 2048
    width: int = 256
    layers: int = 4
    heads: int = 4
    heads_kv: int = 2
    feed_forward: int = 576
    context: int = 4096
    rope_base: float = 10000.0
    norm_epsilon: float = 1e-5

    @property
    def head_width(self) -> int:
        """How wide one head is."""
        return self.width // self.heads


class Block(nn.Module):  # type: ignore[misc]  # torch is not typed here
    """One layer: attention, then the gated feed-forward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        kv_width = shape.heads_kv * shape.head_width
        self.attn_norm = nn.RMSNorm(shape.width, eps=shape.norm_epsilon)
        self.attn_q = nn.Linear(shape.width, shape.width, bias=False)
        self.attn_k = nn.Linear(shape.width, kv_width, bias=False)
        self.attn_v = nn.Linear(shape.width, kv_width, bias=False)
        self.attn_output = nn.Linear(shape.width, shape.width, bias=False)
        self.ffn_norm = nn.RMSNorm(shape.width, eps=shape.norm_epsilon)
        self.ffn_gate = nn.Linear(shape.width, shape.feed_forward, bias=False)
        self.ffn_up = nn.Linear(shape.width, shape.feed_forward, bias=False)
        self.ffn_down = nn.Linear(shape.feed_forward, shape.width, bias=False)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Add what this layer has to say."""
        hidden = hidden + self._attend(self.attn_norm(hidden), cos, sin)
        normed = self.ffn_norm(hidden)
        gated = functional.silu(self.ffn_gate(normed)) * self.ffn_up(normed)
        return hidden + self.ffn_down(gated)

    def _attend(self, normed: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, width = normed.shape
        shape = self.shape

        def heads(projected: Tensor, count: int) -> Tensor:
            return projected.view(rows, length, count, shape.head_width).transpose(1, 2)

        query = rotate(heads(self.attn_q(normed), shape.heads), cos, sin)
        key = rotate(heads(self.attn_k(normed), shape.heads_kv), cos, sin)
        value = heads(self.attn_v(normed), shape.heads_kv)
        group = shape.heads // shape.heads_kv
        mixed = functional.scaled_dot_product_attention(
            query,
            key.repeat_interleave(group, dim=1),
            value.repeat_interleave(group, dim=1),
            is_causal=True,
        )
        return self.attn_output(mixed.transpose(1, 2).reshape(rows, length, width))


class Model(nn.Module):  # type: ignore[misc]  # torch is not typed here
    """Tokens in, logits of the next token out, for every position."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.token_embd = nn.Embedding(shape.vocabulary, shape.width)
        self.blk = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.output_norm = nn.RMSNorm(shape.width, eps=shape.norm_epsilon)
        for name, weight in self.named_parameters():
            if weight.ndim > 1:
                residual = name.endswith(("attn_output.weight", "ffn_down.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * shape.layers) ** (0.5 * residual))

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute the logits of every position."""
        cos, sin = rotation(tokens.shape[1], self.shape)
        hidden = self.token_embd(tokens)
        for block in self.blk:
            hidden = block(hidden, cos, sin)
        return functional.linear(self.output_norm(hidden), self.token_embd.weight)


def rotation(length: int, shape: Shape) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position and pair."""
    exponents = torch.arange(0, shape.head_width, 2) / shape.head_width
    angles = torch.arange(length)[:, None] / shape.rope_base ** exponents[None, :]
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of neighbours by the angle of its position."""
    even, odd = heads[..., 0::2], heads[..., 1::2]
    cos, sin = cos.to(heads.dtype), sin.to(heads.dtype)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
