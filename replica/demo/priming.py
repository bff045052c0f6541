"""Starts a model off able to copy: two attention heads are laid out by hand before the training.

Small networks find out late, after many millions of tokens, that "… A B … A" is likely followed by
B; all of repeating, remembering and calling tools rests on it. So the first layer gets a head that
looks at the token before, and the second one that looks for the token after an earlier equal one.
Training is free to change every weight of it. This file knows the network's layout, and no text.
"""

import torch
from torch import Tensor

from replica.demo.model import Block, Model, Shape

CONSTANT = 0.1
"""Value of the first component of every embedding; it adds the same to all logits, so nothing."""
STEP_BACK_GAIN = 1.3
MATCH_GAIN = 0.25
CARRY_GAIN = 0.3
COPY_GAIN = 0.3
FAST_PAIRS = 12
"""Rotary pairs that turn fast enough to tell neighbours apart; the others hardly turn."""


def prime(model: Model) -> None:
    """Lay out the two heads."""
    shape = model.shape
    first, second = model.blk[0], model.blk[1]
    with torch.no_grad():
        model.token_embd.weight[:, 0] = CONSTANT
        carried = _look_back(first, shape)
        _look_up(second, shape, carried)


def _look_back(block: Block, shape: Shape) -> tuple[Tensor, Tensor]:
    """Head 0 attends one position back and puts what it finds into a place of its own.

    Returns how a token is read, and where it is put: both (head width, width).
    """
    turns = shape.rope_base ** (-torch.arange(FAST_PAIRS) * 2 / shape.head_width)
    fast = slice(0, 2 * FAST_PAIRS)
    block.attn_q.weight[fast] = 0.0
    block.attn_k.weight[fast] = 0.0
    block.attn_q.weight[0 : 2 * FAST_PAIRS : 2, 0] = STEP_BACK_GAIN * turns.cos()
    block.attn_q.weight[1 : 2 * FAST_PAIRS : 2, 0] = -STEP_BACK_GAIN * turns.sin()
    block.attn_k.weight[0 : 2 * FAST_PAIRS : 2, 0] = STEP_BACK_GAIN
    reads = _directions(shape)
    places = _directions(shape)
    block.attn_v.weight[: shape.head_width] = CARRY_GAIN * reads
    block.attn_output.weight[:, : shape.head_width] = CARRY_GAIN * places.T
    return reads, places


def _look_up(block: Block, shape: Shape, carried: tuple[Tensor, Tensor]) -> None:
    """Head 0 attends where the carried token equals the present one, and copies what is there."""
    reads, places = carried
    slow = slice(2 * FAST_PAIRS, shape.head_width)
    block.attn_q.weight[: 2 * FAST_PAIRS] = 0.0
    block.attn_k.weight[: 2 * FAST_PAIRS] = 0.0
    block.attn_q.weight[slow] = MATCH_GAIN * reads[slow] * shape.width**0.5
    block.attn_k.weight[slow] = MATCH_GAIN * places[slow] * shape.width**0.5
    copies = _directions(shape)
    block.attn_v.weight[: shape.head_width] = COPY_GAIN * copies * shape.width**0.5
    block.attn_output.weight[:, : shape.head_width] = COPY_GAIN * copies.T


def _directions(shape: Shape) -> Tensor:
    """Random orthogonal directions that do not see the constant component."""
    drawn = torch.randn(shape.width - 1, shape.head_width)
    directions = torch.linalg.qr(drawn).Q.T
    return torch.cat((torch.zeros(shape.head_width, 1), directions), dim=1)
