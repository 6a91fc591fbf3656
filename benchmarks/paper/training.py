"""Training steps: building them, timing them in turn with different attentions, and running them."""

import dataclasses
import functools
import gc
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.stats
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .models import Attention, Config, Transformer, classified_tokens
from .passes import failure, planned_bytes
from .results import Row

Batch = dict[str, np.ndarray]
Loss = Callable[[Transformer, Any, jax.Array | None], jax.Array]
PEAK_FLOPS = {"NVIDIA H100": 989e12, "NVIDIA H200": 989e12}  # dense bfloat16, from the vendor
WARM_UP = 100  # steps until the learning rate reaches its maximum
ROUNDS = 5
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


# --- losses: functions of a model, a batch, and a dropout key or None -------------------------------------------------


def next_token(model: Transformer, batch: Any, key: jax.Array | None) -> jax.Array:
    """Return the mean cross-entropy, in nats per token."""
    logits = model.logits(model(batch["tokens"][:, :-1], key=key))
    return cross_entropy(logits, batch["tokens"][:, 1:]).mean()


def masked_tokens(model: Transformer, batch: Any, key: jax.Array | None) -> jax.Array:
    """Return the mean cross-entropy at the masked positions, [B, M]. Only these are projected to the vocabulary."""
    features = model(batch["tokens"], batch["lengths"], key)
    logits = model.logits(jnp.take_along_axis(features, batch["positions"][..., None], 1))
    return cross_entropy(logits, batch["targets"]).mean()


def label(model: Transformer, batch: Any, key: jax.Array | None) -> jax.Array:
    return cross_entropy(class_logits(model, batch, key), batch["labels"]).mean()


def label_and_targets(model: Transformer, batch: Any, key: jax.Array | None) -> jax.Array:
    """Return the loss of the labels, plus the mean loss of the tokens with a nonzero target."""
    tokens, targets = batch["tokens"], batch["targets"]
    features = model(tokens, None, key)
    logits = model.classify(features, classified_tokens(model.config, tokens, None))
    target_loss = cross_entropy(model.logits(features), targets).mean(where=targets > 0)
    return cross_entropy(logits, batch["labels"]).mean() + target_loss


def class_logits(model: Transformer, batch: Any, key: jax.Array | None) -> jax.Array:
    lengths = batch.get("lengths")
    counted = classified_tokens(model.config, batch["tokens"], lengths)
    return model.classify(model(batch["tokens"], lengths, key), counted)


# --- steps ------------------------------------------------------------------------------------------------------------


class Trainer:
    """The weights of a model and the state of AdamW. The seed determines initial weights and dropout.

    Each device has all weights, and its share of a batch.
    """

    def __init__(self, config: Config, loss: Loss, seed: int = 0, devices: Sequence[jax.Device] | None = None):
        self.config, self.loss = config, loss
        self.mesh = Mesh(np.array(devices or jax.devices()[:1]), ("batch",))
        self.optimizer = optax.chain(
            optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=0.98), optax.add_decayed_weights(0.1)
        )
        self.compiled: Any = jax.jit(self._steps, donate_argnums=(0, 1))
        self.restart(seed)

    def restart(self, seed: int) -> None:
        """Reset weights and optimizer. Compiled programs are kept."""
        self.graph, weights = nnx.split(Transformer(self.config, nnx.Rngs(seed)))
        self.weights, self.state = self.placed((weights, self.optimizer.init(weights)))
        # Training takes as long with JAX's default generator.
        self.key, self.count = jax.random.key(seed, impl="rbg"), 0

    def placed(self, arrays: Any, *dims: str | None) -> Any:
        """Put arrays on the devices. Dims named "batch" are sharded."""
        return jax.device_put(arrays, NamedSharding(self.mesh, PartitionSpec(*dims)))

    def _steps(self, weights: Any, state: Any, batches: Any, rates: jax.Array, key: jax.Array, first: jax.Array) -> Any:
        def step(weights_and_state: Any, given: Any) -> Any:
            weights, state = weights_and_state
            batch, rate, number = given

            def loss_of(weights: Any) -> jax.Array:
                return self.loss(nnx.merge(self.graph, weights), batch, jax.random.fold_in(key, number))

            loss, gradients = jax.value_and_grad(loss_of)(weights)
            updates, state = self.optimizer.update(gradients, state, weights)
            return (jax.tree.map(lambda x, update: x - rate * update, weights, updates), state), loss

        given = batches, rates, first + jnp.arange(len(rates))
        (weights, state), losses = jax.lax.scan(step, (weights, state), given)
        return weights, state, losses

    def _arguments(self, batches: Batch, rates: np.ndarray) -> tuple[Any, ...]:
        return self.weights, self.state, batches, rates.astype(np.float32), self.key, np.int32(self.count)

    def steps(self, batches: Batch, rates: np.ndarray) -> jax.Array:
        """Run one step per rate in one program. Return the losses. `batches` is stacked along the steps."""
        self.weights, self.state, losses = self.compiled(*self._arguments(batches, rates))
        self.count += len(rates)
        return losses

    def compile(self, batches: Batch) -> int:
        """Compile, and return the program's bytes: weights, optimizer state, batches, and what else XLA plans."""
        rates = np.zeros(len(next(iter(batches.values()))))
        self.compiled = self.compiled.lower(*self._arguments(batches, rates)).compile()
        return planned_bytes(self.compiled)

    @property
    def parameters(self) -> int:
        return sum(x.size for x in jax.tree.leaves(self.weights))

    @functools.cached_property
    def evaluate(self) -> Callable[[Any, Any], jax.Array]:
        """Compute the loss without dropout, from weights and a batch."""
        return jax.jit(lambda weights, batch: self.loss(nnx.merge(self.graph, weights), batch, None))

    @functools.cached_property
    def predict(self) -> Callable[[Any, Any], jax.Array]:
        """Return the most likely class of each row, from weights and a batch."""
        return jax.jit(lambda weights, batch: class_logits(nnx.merge(self.graph, weights), batch, None).argmax(-1))

    def mean_loss(self, batches: Iterable[Batch]) -> float:
        return float(np.mean([float(self.evaluate(self.weights, self.placed(batch, "batch"))) for batch in batches]))

    def accuracy(self, batches: Iterable[Batch], confidence: float) -> dict[str, Any]:
        right = [self.predict(self.weights, self.placed(batch, "batch")) == batch["labels"] for batch in batches]
        return accuracy_of(np.concatenate(right), confidence)


def accuracy_of(right: np.ndarray, confidence: float) -> dict[str, Any]:
    """Return the accuracy with its exact binomial (Clopper-Pearson) interval."""
    interval = scipy.stats.binomtest(int(right.sum()), right.size).proportion_ci(confidence)
    return {
        "accuracy": float(right.mean()),
        "interval": [float(interval.low), float(interval.high)],
        "confidence": confidence,
        "examples": int(right.size),
    }


def train(
    trainer: Trainer,
    batches: Iterator[Batch],
    rate: float,
    *,
    steps: float = math.inf,
    seconds: float = math.inf,
    steps_per_program: int = 1,
) -> Iterator[float]:
    """Train for a number of steps or seconds. Yield the loss of each step.

    The learning rate warms up, then decays to 0 along a cosine. Each program runs `steps_per_program` steps. The time
    counts from the second program on, since the first is compiled.
    """
    start = time.perf_counter()
    waiting: list[jax.Array] = []
    for first in itertools.count(0, steps_per_program):
        if first == steps_per_program:
            start = time.perf_counter()
        elapsed = (time.perf_counter() - start) / seconds if first else 0.0
        numbers = first + np.arange(steps_per_program)
        done = np.maximum(numbers / steps, elapsed)
        if done[0] >= 1:
            break
        factors = np.minimum(1, (numbers + 1) / WARM_UP) * (1 + np.cos(np.pi * np.minimum(done, 1))) / 2
        given = trainer.placed(stacked(itertools.islice(batches, steps_per_program)), None, "batch")
        waiting.append(trainer.steps(given, rate * factors))
        if len(waiting) > 2 or not first:  # keeps a short queue, so the device is never idle
            yield from np.asarray(waiting.pop(0)).tolist()
    for losses in waiting:
        yield from np.asarray(losses).tolist()


def timed(trainer: Trainer, batches: Iterator[Batch], rate: float, steps: int) -> tuple[float, list[float]]:
    """Train for a number of steps. Return the seconds and about 200 of the losses."""
    start = time.perf_counter()
    losses = list(train(trainer, batches, rate, steps=steps))
    return time.perf_counter() - start, losses[:: max(1, steps // 200)]


def stacked(batches: Iterable[Batch]) -> Batch:
    found = list(batches)
    return {name: np.stack([batch[name] for batch in found]) for name in found[0]}


def attempted(make_row: Callable[[], Row]) -> Row:
    """Return the row, or the reason why it failed. So a failure with one attention does not end a section."""
    try:
        row = make_row() | {"failure": None}
    except Exception as error:
        row = {"failure": failure(error)}
    gc.collect()  # frees the arrays of a failure
    return row


# --- speed ------------------------------------------------------------------------------------------------------------


def attentions(*others: Attention) -> list[Attention]:
    """Return the attentions that can run here. cuDNN needs a GPU."""
    cudnn: list[Attention] = ["cudnn"] if jax.default_backend() == "gpu" else []
    return ["standard", *cudnn, "flash", *others]


def compare(
    config: Config,
    loss: Loss,
    make_batch: Callable[[int], Batch],
    batch: int,
    names: list[Attention],
    seconds: float,
    steps_per_program: int = 1,
) -> list[Row]:
    """Time a training step with each attention, in turn. Each program runs `steps_per_program` steps.

    A batch that does not fit into memory is halved until it does. Attentions that cannot be measured have a failure.
    """
    rows: list[Row] = [
        {
            "attention": name,
            "length": config.length,
            "dropout": config.dropout,
            "attention_dropout": 0.0 if name == "cudnn" else config.dropout,
            "batch": batch,
            "failure": None,
        }
        for name in names
    ]
    trainers: dict[str, tuple[Trainer, Any]] = {}
    # Reversed, so standard attention comes last. Its memory then includes all other weights, as when it is timed.
    for row in reversed(rows):
        variant = dataclasses.replace(config, attention=row["attention"])
        while row["batch"] and "bytes" not in row and row["failure"] is None:
            batches = jax.device_put(stacked([make_batch(row["batch"])] * steps_per_program))
            try:
                trainer, row["bytes"] = ready(variant, loss, batches)
                trainers[row["attention"]] = trainer, batches
            except Exception as error:
                if "RESOURCE_EXHAUSTED" in str(error) and row["batch"] > 1:
                    row["batch"] //= 2
                else:
                    row["failure"] = failure(error)
            gc.collect()  # frees the arrays of a failure
    times: dict[str, list[float]] = {name: [] for name in trainers}
    for _ in range(ROUNDS):
        for name, (trainer, batches) in trainers.items():
            times[name].append(seconds_per_step(trainer, batches, seconds / ROUNDS))
    for row in rows:
        if row["attention"] in trainers:
            trainer, _ = trainers[row["attention"]]
            row |= speed(config, trainer.parameters, row["batch"], float(np.median(times[row["attention"]])))
    return rows


def ready(config: Config, loss: Loss, batches: Any) -> tuple[Trainer, int]:
    """Return a trainer that has run its program twice, and its bytes."""
    trainer = Trainer(config, loss)
    size = trainer.compile(batches)
    for _ in range(2):
        jax.block_until_ready(trainer.steps(batches, rates_of(batches)))
    return trainer, size


def rates_of(batches: Any) -> np.ndarray:
    """Return arbitrary learning rates, for steps that are only timed."""
    return np.full(len(next(iter(batches.values()))), 1e-4)


def seconds_per_step(trainer: Trainer, batches: Any, seconds: float) -> float:
    """Time at least three programs, enqueued one after the other, for approximately this many seconds."""
    rates = rates_of(batches)

    def per_program(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            losses = trainer.steps(batches, rates)
        jax.block_until_ready(losses)
        return (time.perf_counter() - start) / count

    return per_program(max(3, math.ceil(seconds / per_program(1)))) / len(rates)


def speed(config: Config, parameters: int, batch: int, seconds: float) -> dict[str, Any]:
    """Return the fields of a row from the batch size and the seconds per step."""
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
