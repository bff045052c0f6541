"""Trains the demo model: `python -m replica.demo.train`, then `python -m replica.demo.convert`.

Every block of the corpus is new, so nothing is seen twice word for word; what repeats are the
answers. Needs the `train` extra. It writes a tokenizer and the weights, and knows nothing of GGUF.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random

import click
import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from replica.demo import tokenizer as bpe
from replica.demo.conversation import TEXT_END, Conversation, segments
from replica.demo.corpus import conversation, long_conversation
from replica.demo.model import Model, Shape
from replica.demo.phrasing import chance
from replica.demo.priming import prime

PROMPT_WEIGHT = 0.1
"""What a token of the prompt counts in the loss, where one of an answer counts 1."""
DRILL_WEIGHT = 0.7
BLOCK_CONVERSATIONS = 1500
"""How many conversations are made at a time."""
EMBEDDING_RATE = 0.25
"""The learning rate of the embedding, as a part of that of the layers."""
LOG_STEPS = 50
WARM_UP_SHARE = 0.02
DECAY_SHARE = 0.5
"""In the last part of the steps the learning rate falls to zero."""


@dataclass(frozen=True)
class Phase:
    """A part of the training: rows of one length, for a share of the steps."""

    share: float
    length: int
    rows: int
    long_share: float
    """Share of conversations that begin with a long system prompt."""
    very_long_share: float = 0.0
    """Share of conversations of some thousand tokens."""
    drill_share: float = 0.0
    """Share of rows that are nothing but a drill in copying."""


PHASES = (
    Phase(share=0.15, length=128, rows=32, long_share=0.0, drill_share=0.25),
    Phase(share=0.30, length=256, rows=16, long_share=0.03, drill_share=0.08),
    Phase(share=0.40, length=512, rows=8, long_share=0.03, drill_share=0.03),
    Phase(share=0.10, length=1024, rows=4, long_share=0.08),
    Phase(share=0.05, length=4096, rows=1, long_share=0.2, very_long_share=0.5),
)
PHASES_MORE = (
    Phase(share=0.74, length=512, rows=8, long_share=0.03, drill_share=0.03),
    Phase(share=0.14, length=1024, rows=4, long_share=0.08),
    Phase(share=0.12, length=2048, rows=2, long_share=0.1, very_long_share=0.2),
)
"""For going on with what is trained."""


Material = Callable[[Phase], Iterator[tuple[Tensor, Tensor]]]
"""What gives the batches of a phase."""


@dataclass(frozen=True)
class Budget:
    """How long the training may take; what is used up first counts."""

    steps: int
    minutes: float
    began: float

    def spent(self, step: int) -> float:
        """The share that is used up."""
        return max(step / self.steps, (time.monotonic() - self.began) / 60 / self.minutes)


def encode(tokenizer: Tokenizer, each: Conversation) -> tuple[list[int], list[float]]:
    """Tokens of a conversation, and what each counts in the loss."""
    tokens: list[int] = []
    weights: list[float] = []
    for text, own in segments(each):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        tokens += ids
        weights += [1.0 if own else PROMPT_WEIGHT] * len(ids)
    tokens.append(tokenizer.token_to_id(TEXT_END))
    weights.append(0.0)
    return tokens, weights


def drill(random: Random, length: int) -> tuple[list[int], list[float]]:
    """A row of random tokens said several times over: the quickest way to learn to copy."""
    tokens: list[int] = []
    weights: list[float] = []
    while len(tokens) < length:
        pattern = random.choices(range(bpe.VOCABULARY), k=random.randint(3, max(length // 5, 10)))
        times = random.randint(2, 4)
        tokens += pattern * times
        weights += [0.0] * (len(pattern) + 1)
        weights += [DRILL_WEIGHT] * (len(pattern) * (times - 1) - 1)
    return tokens[:length], weights[:length]


def batches(tokenizer: Tokenizer, random: Random, phase: Phase) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows full of conversations, each row from the beginning of one; without end."""
    rows: list[tuple[list[int], list[float]]] = []
    tokens: list[int] = []
    weights: list[float] = []
    while True:
        for _ in range(BLOCK_CONVERSATIONS):
            if chance(random, phase.very_long_share):
                made = long_conversation(random)
            else:
                made = conversation(random, long_share=phase.long_share)
            more_tokens, more_weights = encode(tokenizer, made)
            tokens += more_tokens
            weights += more_weights
            if len(tokens) > phase.length:
                rows.append((tokens[: phase.length + 1], weights[: phase.length + 1]))
                tokens, weights = [], []
                if chance(random, phase.drill_share):
                    rows.append(drill(random, phase.length + 1))
        random.shuffle(rows)
        while len(rows) >= phase.rows:
            taken, rows = rows[: phase.rows], rows[phase.rows :]
            yield torch.tensor([row[0] for row in taken]), torch.tensor([row[1] for row in taken])


def optimizers(model: Model, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms.

    The embedding learns slowly: every row moves at every step, and rare tokens, all pushed the same
    way, would become alike and could no longer be copied.
    """
    matrices = [weight for weight in model.blk.parameters() if weight.ndim > 1]
    chosen = {id(weight) for weight in matrices}
    others = [weight for weight in model.parameters() if id(weight) not in chosen]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate * EMBEDDING_RATE, weight_decay=0.0, betas=(0.9, 0.95)),
    ]


def schedule(done: float) -> float:
    """The learning rate at this share of the training, as a part of its peak."""
    if done < WARM_UP_SHARE:
        return max(done / WARM_UP_SHARE, 0.01)
    return min(1.0, max(1.0 - done, 0.0) / DECAY_SHARE)


def learn(
    model: Model, steppers: list[torch.optim.Optimizer], batch: tuple[Tensor, Tensor]
) -> float:
    """Take one step; the loss is that of the answers' tokens."""
    tokens, weights = batch
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(tokens[:, :-1])
    losses = functional.cross_entropy(
        logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
    )
    counted = weights[:, 1:].flatten()
    loss = (losses * counted).sum() / counted.sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for stepper in steppers:
        stepper.step()
        stepper.zero_grad()
    own = counted == 1.0
    return float(losses.detach()[own].mean())


def train(
    model: Model, phases: tuple[Phase, ...], material: Material, budget: Budget, rate: float
) -> None:
    """Go through all phases, until the steps or the minutes are used up."""
    steppers = optimizers(model, rate)
    groups = [group for stepper in steppers for group in stepper.param_groups]
    peaks = [group["lr"] for group in groups]
    step, end, smooth = 0, 0.0, 0.0
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, refresh_per_second=0.5) as progress:
        task = progress.add_task("training", total=1.0)
        for phase in phases:
            end = min(end + phase.share, 0.9999)
            source = material(phase)
            while (done := budget.spent(step)) < end:
                for group, peak in zip(groups, peaks, strict=True):
                    group["lr"] = peak * schedule(done)
                loss = learn(model, steppers, next(source))
                step += 1
                smooth += (loss - smooth) * max(1 / step, 0.02)
                said = f"step {step}, rows of {phase.length}, loss {smooth:.4f}"
                progress.update(task, completed=done, description=said)
                if step % LOG_STEPS == 0:
                    progress.console.print(f"{done:7.2%}  {said}", highlight=False)


@click.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("build/demo"),
    show_default=True,
    help="Folder for tokenizer and weights.",
)
@click.option("--steps", default=4800, show_default=True, help="Steps of 4096 tokens.")
@click.option("--minutes", default=600.0, show_default=True, help="Shorten it to this time.")
@click.option("--threads", default=2, show_default=True, help="Threads of PyTorch.")
@click.option("--rate", default=2.5e-3, show_default=True, help="Peak learning rate.")
@click.option("--seed", default=1, show_default=True, help="Seed of corpus and weights.")
@click.option("--resume", is_flag=True, help="Go on from what lies in --out; use another seed.")
def main(  # noqa: PLR0913, PLR0917 -- click passes each option by name
    out: Path,
    steps: int,
    minutes: float,
    threads: int,
    rate: float,
    seed: int,
    resume: bool,  # noqa: FBT001 -- a flag
) -> None:
    """Train the demo model's tokenizer and weights."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    shape = Shape(vocabulary=bpe.VOCABULARY)
    model = Model(shape)
    if resume:
        tokenizer = bpe.load(out / "tokenizer.json")
        model.load_state_dict(torch.load(out / "model.pt", weights_only=True)["weights"])
    else:
        out.mkdir(parents=True, exist_ok=True)
        tokenizer = bpe.train(seed, conversations=12000)
        tokenizer.save(str(out / "tokenizer.json"))
        prime(model)
    model.compile()  # fuses what lies between the multiplications: a third faster
    random = Random(seed + 1)  # noqa: S311  -- a corpus is repeatable, not secret
    material = partial(batches, tokenizer, random)
    budget = Budget(steps, minutes, time.monotonic())
    train(model, PHASES_MORE if resume else PHASES, material, budget, rate)
    torch.save({"shape": asdict(shape), "weights": model.state_dict()}, out / "model.pt")


if __name__ == "__main__":
    main()
