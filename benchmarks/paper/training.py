"""Training steps: made, timed in turn beside those of another attention, and taken one after the other."""

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.stats
from flax import nnx

from .models import Attention, Config, Transformer
from .passes import planned_bytes

Batch = dict[str, np.ndarray]
Loss = Callable[[Transformer, Any, jax.Array | None], jax.Array]
PEAK_FLOPS = {"NVIDIA H100": 989e12, "NVIDIA H200": 989e12}  # dense bfloat16, by the vendor
WARM_UP = 100  # steps until the learning rate is full
ROUNDS = 5


# --- losses: of a model and a batch, with a key for dropout or none ---------------------------------------------------


def next_token(model: Transformer, batch: Any, key: jax.Array | None) -> jax.Array:
    """The mean cross-entropy, in nats a token."""
    logits = model.logits(model(batch["tokens"][:, :-1], key=key))
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()


def masked_tokens(model: Transformer, batch: Any, key: jax.Array | None) -> jax.Array:
    """Only the masked positions, [B, M], go through the vocabulary."""
    features = model(batch["tokens"], batch["lengths"], key)
    logits = model.logits(jnp.take_along_axis(features, batch["positions"][..., None], 1))
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def label(model: Transformer, batch: Any, key: jax.Array | None) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(class_logits(model, batch, key), batch["labels"]).mean()


def class_logits(model: Transformer, batch: Any, key: jax.Array | None) -> jax.Array:
    return model.classify(model(batch["tokens"], batch.get("lengths"), key), batch.get("lengths"))


# --- steps ------------------------------------------------------------------------------------------------------------


class Trainer:
    """The weights of a model and the state of AdamW. Weights and dropout follow from the seed."""

    def __init__(self, config: Config, loss: Loss, seed: int = 0):
        self.config, self.loss = config, loss
        self.optimizer = optax.chain(
            optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=0.98), optax.add_decayed_weights(0.1)
        )
        self.compiled: Any = jax.jit(self._step, donate_argnums=(0, 1))
        self.restart(seed)

    def restart(self, seed: int) -> None:
        """As new; what is compiled stays."""
        self.graph, self.weights = nnx.split(Transformer(self.config, nnx.Rngs(seed)))
        self.state = self.optimizer.init(self.weights)
        self.key, self.count = jax.random.key(seed, impl="rbg"), 0  # the generator that costs least on a GPU

    def _step(self, weights: Any, state: Any, batch: Any, rate: jax.Array, key: jax.Array) -> Any:
        def loss_of(weights: Any) -> jax.Array:
            return self.loss(nnx.merge(self.graph, weights), batch, key)

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        updates, state = self.optimizer.update(gradients, state, weights)
        return jax.tree.map(lambda x, update: x - rate * update, weights, updates), state, loss

    def step(self, batch: Batch, rate: float) -> jax.Array:
        key = jax.random.fold_in(self.key, self.count)
        self.weights, self.state, loss = self.compiled(self.weights, self.state, batch, np.float32(rate), key)
        self.count += 1
        return loss

    def compile(self, batch: Batch) -> int:
        """The bytes that a step takes: weights, optimiser, batch, and what XLA plans for all that lies between."""
        arguments = (self.weights, self.state, batch, np.float32(0), self.key)
        self.compiled = self.compiled.lower(*arguments).compile()
        return planned_bytes(self.compiled)

    @property
    def parameters(self) -> int:
        return sum(x.size for x in jax.tree.leaves(self.weights))

    @functools.cached_property
    def evaluate(self) -> Callable[[Any, Any], jax.Array]:
        """Of weights and a batch: the loss without dropout."""
        return jax.jit(lambda weights, batch: self.loss(nnx.merge(self.graph, weights), batch, None))

    @functools.cached_property
    def predict(self) -> Callable[[Any, Any], jax.Array]:
        """Of weights and a batch: the likeliest class of each row."""
        return jax.jit(lambda weights, batch: class_logits(nnx.merge(self.graph, weights), batch, None).argmax(-1))

    def mean_loss(self, batches: Iterable[Batch]) -> float:
        return float(np.mean([float(self.evaluate(self.weights, batch)) for batch in batches]))

    def accuracy(self, batches: Iterable[Batch], confidence: float) -> dict[str, Any]:
        """With the exact binomial (Clopper-Pearson) interval."""
        right = np.concatenate([self.predict(self.weights, batch) == batch["labels"] for batch in batches])
        interval = scipy.stats.binomtest(int(right.sum()), right.size).proportion_ci(confidence)
        return {
            "accuracy": float(right.mean()),
            "interval": [float(interval.low), float(interval.high)],
            "confidence": confidence,
            "examples": int(right.size),
        }


def train(
    trainer: Trainer, batches: Iterator[Batch], rate: float, *, steps: float = math.inf, seconds: float = math.inf
) -> Iterator[float]:
    """The loss of each step, for so many steps or seconds. The learning rate warms up, and falls to 0 along a cosine.

    The seconds count from the second step on, since the first compiles.
    """
    start = time.perf_counter()
    waiting: list[jax.Array] = []
    for step in itertools.count():
        if step == 1:
            start = time.perf_counter()
        done = max(step / steps, (time.perf_counter() - start) / seconds if step else 0)
        if done >= 1:
            break
        factor = min(1, (step + 1) / WARM_UP) * (1 + math.cos(math.pi * done)) / 2
        waiting.append(trainer.step(next(batches), rate * factor))
        if len(waiting) > 2 or step == 0:  # the device always has a step to go on with, and not many
            yield float(waiting.pop(0))
    yield from map(float, waiting)


# --- speed ------------------------------------------------------------------------------------------------------------


def attentions(*others: Attention) -> list[Attention]:
    """Those that can run here: cuDNN's needs a GPU."""
    cudnn: list[Attention] = ["cudnn"] if jax.default_backend() == "gpu" else []
    return ["standard", *cudnn, "flash", *others]


def compare(
    config: Config, loss: Loss, make_batch: Callable[[int], Batch], batch: int, names: list[Attention], seconds: float
) -> list[dict[str, Any]]:
    """A training step with each attention, timed in turn. A batch that does not fit into memory is halved until it
    does; without `bytes` not even a batch of one does."""
    rows: list[dict[str, Any]] = [
        {"attention": name, "length": config.length, "dropout": config.dropout, "batch": batch} for name in names
    ]
    trainers: dict[str, tuple[Trainer, Batch]] = {}
    for row in reversed(rows):  # standard attention last, beside the weights of all others, as it is when it is timed
        name = row["attention"]
        variant = dataclasses.replace(config, attention=name)
        while row["batch"] and "bytes" not in row:
            found = fitting(variant, loss, make_batch(row["batch"]))
            if found is None:
                row["batch"] //= 2
            else:
                trainer, row["bytes"] = found
                trainers[name] = trainer, make_batch(row["batch"])
    times: dict[str, list[float]] = {name: [] for name in trainers}
    for _ in range(ROUNDS):
        for name, (trainer, data) in trainers.items():
            times[name].append(seconds_a_step(trainer, data, seconds / ROUNDS))
    for row in rows:
        if row["attention"] in trainers:
            trainer, _ = trainers[row["attention"]]
            row |= speed(config, trainer.parameters, row["batch"], float(np.median(times[row["attention"]])))
    return rows


def fitting(config: Config, loss: Loss, batch: Batch) -> tuple[Trainer, int] | None:
    """A trainer that has taken two steps, and its bytes; None if memory does not suffice."""
    trainer = Trainer(config, loss)
    try:
        size = trainer.compile(batch)
        for _ in range(2):
            jax.block_until_ready(trainer.step(batch, 1e-4))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None
    return trainer, size


def seconds_a_step(trainer: Trainer, batch: Batch, seconds: float) -> float:
    """Of steps that are enqueued one after the other, three or more, for about so many seconds."""

    def steps(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            loss = trainer.step(batch, 1e-4)
        jax.block_until_ready(loss)
        return (time.perf_counter() - start) / count

    return steps(max(3, math.ceil(seconds / steps(1))))


def speed(config: Config, parameters: int, batch: int, seconds: float) -> dict[str, Any]:
    """Figures of a step of so many rows that takes so many seconds."""
    tokens = batch * config.length / seconds
    peak = PEAK_FLOPS.get(" ".join(jax.devices()[0].device_kind.split()[:2]))
    utilisation = None if peak is None else tokens * config.flops_per_token(parameters) / peak
    return {
        "parameters": parameters,
        "seconds_a_step": seconds,
        "steps_per_second": 1 / seconds,
        "tokens_per_second": tokens,
        "model_flop_utilisation": utilisation,
    }
