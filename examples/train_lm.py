"""Train a small GPT on the source code of Python's standard library with fused attention, and check the claims.

    python examples/train_lm.py             # two minutes on two CPU cores
    python examples/train_lm.py --help      # every size is a flag
    python examples/train_lm.py --layers 12 --width 768 --heads 12 --seq-len 1024 --batch 32 --steps 5000   # a GPU

The example shows:

  1. `jax_flash.nnx.MultiHeadAttention` in one jitted train step, with dropout on the attention weights;

  2. the same loss curve as standard attention with the same dropout masks, because the result is exact;

  3. the time and memory of the attention call, compared with XLA's standard attention. On a GPU it also compares the
     speed of training with XLA's and cuDNN's attention;

  4. generation with the same module: the prompt enters the key/value cache in one call, then one token at a time.

The output directory receives `loss.png`, `sample.txt` and `results.json`.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

import jax_flash
import jax_flash.nnx

matplotlib.use("Agg")
import matplotlib.pyplot as plt

console = Console()


# The text


class Vocabulary:
    """The 128 ASCII characters, and the chunks of text that save the most: words with their space, indentations."""

    chunks = re.compile(r"\n *| ?[A-Za-z]+| +|.", re.DOTALL)

    def __init__(self, text: str, size: int):
        savings = Counter(self.chunks.findall(text))
        for chunk in savings:
            savings[chunk] *= len(chunk) - 1
        characters = [chr(code) for code in range(128)]
        self.pieces = characters + [chunk for chunk, _ in savings.most_common(size - len(characters))]
        self.ids = {piece: i for i, piece in enumerate(self.pieces)}

    def encode(self, text: str) -> np.ndarray:
        """ASCII text -> int32 [tokens]; a chunk without a token is split into characters."""
        ids: list[int] = []
        for chunk in self.chunks.findall(text):
            if chunk in self.ids:
                ids.append(self.ids[chunk])
            else:
                ids.extend(map(ord, chunk))
        return np.array(ids, np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.pieces[i] for i in ids)


def read_standard_library() -> str:
    """The source of the standard library's own modules, in the same order everywhere; what is not ASCII becomes "?"."""
    root = Path(sysconfig.get_paths()["stdlib"])
    unwanted = {"site-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"}
    files = [path for path in sorted(root.rglob("*.py")) if unwanted.isdisjoint(path.relative_to(root).parts)]
    text = "\n".join(path.read_text("utf-8", errors="replace") for path in files)
    return text.encode("ascii", errors="replace").decode("ascii")


# The model


def sinusoids(length: int, width: int) -> np.ndarray:
    """The position encoding of "Attention Is All You Need", float32 [length, width]."""
    angles = np.arange(length)[:, None] / 10_000 ** (np.arange(0, width, 2) / width)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)[:, :width].astype(np.float32)


# Names of the implementations of jax.nn.dot_product_attention.
JAX_NN: dict[str, Literal["xla", "cudnn"]] = {"jax.nn": "xla", "cudnn": "cudnn"}


def jax_nn_attention(
    implementation: Literal["xla", "cudnn"], window: tuple[int, int] | None
) -> Callable[..., jax.Array]:
    """`jax.nn.dot_product_attention`, which has no dropout, for the stock module."""

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, **_: Any) -> jax.Array:
        return jax.nn.dot_product_attention(
            query, key, value, is_causal=True, local_window_size=window, implementation=implementation
        )

    return attend


class Block(nnx.Module):
    """One pre-norm transformer block: attention, then a two-layer perceptron, each added to its input."""

    def __init__(self, args: argparse.Namespace, window: tuple[int, int] | None, rngs: nnx.Rngs):
        width, dtype = args.width, args.dtype
        common: dict[str, Any] = {"num_kv_heads": args.kv_heads, "use_bias": False, "dtype": dtype, "rngs": rngs}
        self.attention_norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.attention: nnx.MultiHeadAttention
        if args.implementation in JAX_NN:
            attention_fn = jax_nn_attention(JAX_NN[args.implementation], window)
            self.attention = nnx.MultiHeadAttention(args.heads, width, attention_fn=attention_fn, **common)
        else:
            self.attention = jax_flash.nnx.MultiHeadAttention(
                args.heads,
                width,
                is_causal=True,
                local_window_size=window,
                dropout_rate=args.dropout,
                broadcast_dropout=False,
                implementation=args.implementation,
                **common,
            )
        self.mlp_norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, decode: bool) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), decode=decode, deterministic=decode)
        return x + self.down(jax.nn.gelu(self.up(self.mlp_norm(x))))


class GPT(nnx.Module):
    """A decoder-only transformer. Its first layers see only a few tokens, which helps it to learn to spell."""

    def __init__(self, args: argparse.Namespace, rngs: nnx.Rngs):
        self.seq_len, self.width, self.dtype = args.seq_len, args.width, args.dtype
        self.embed = nnx.Embed(
            args.vocabulary, args.width, embedding_init=nnx.initializers.normal(0.25), dtype=args.dtype, rngs=rngs
        )
        windows = [(args.window, 0) if layer < args.local_layers else None for layer in range(args.layers)]
        self.blocks = nnx.List([Block(args, window, rngs) for window in windows])
        self.norm = nnx.RMSNorm(args.width, dtype=args.dtype, rngs=rngs)
        self.head = nnx.Linear(args.width, args.vocabulary, use_bias=False, dtype=args.dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array, position: jax.Array | None = None) -> jax.Array:
        """Tokens [B, T] -> logits [B, T, vocabulary] of the token after each.

        `position` is the position of tokens[:, 0]. If it is given, the model attends to its cache, without dropout.
        """
        decode = position is not None
        positions = jnp.arange(tokens.shape[1]) + (0 if position is None else position)
        x = self.embed(tokens) + 0.25 * jnp.asarray(sinusoids(self.seq_len, self.width), self.dtype)[positions]
        for block in self.blocks:
            x = block(x, decode)
        return self.head(self.norm(x)).astype(jnp.float32)

    def init_cache(self, batch: int) -> None:
        """Makes room for a batch of sequences of up to seq_len tokens in every block's key/value cache."""
        for block in self.blocks:
            block.attention.init_cache((batch, self.seq_len, self.width), self.dtype)


# Training


@nnx.jit
def train_step(model: GPT, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    """One step on tokens [B, T + 1]; returns the mean cross-entropy in nats per token."""

    def loss_of(model: GPT) -> jax.Array:
        logits = model(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


def train(args: argparse.Namespace, corpus: np.ndarray, steps: int, name: str) -> tuple[GPT, list[float], float]:
    """Trains a new model for some steps of the schedule; the seed decides weights, batches and dropout masks.

    Returns the model, the loss of each step, and tokens per second (without the first step, which compiles).
    """
    model = GPT(args, nnx.Rngs(args.seed))
    warmup = min(100, args.steps // 10)
    schedule = optax.warmup_cosine_decay_schedule(0.0, args.learning_rate, warmup, max(args.steps, warmup + 1))
    optimizer = nnx.Optimizer(
        model, optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98)), wrt=nnx.Param
    )
    batches = np.random.default_rng(args.seed)
    tokens_per_step = args.batch * args.seq_len

    losses: list[float] = []
    rate = 0.0
    with Progress(
        SpinnerColumn(),  # turns while the first step compiles
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  {task.fields[rate]:,.0f} tokens/s"),
        TimeRemainingColumn(),
        console=console,
    ) as progress:
        bar = progress.add_task(name, total=steps, loss=float("nan"), rate=0.0)
        for step in range(steps):
            if step == 1:
                start = time.perf_counter()
            starts = batches.integers(len(corpus) - args.seq_len, size=(args.batch, 1))
            tokens = jnp.asarray(corpus[starts + np.arange(args.seq_len + 1)])
            losses.append(float(train_step(model, optimizer, tokens)))
            if step > 0:
                rate = step * tokens_per_step / (time.perf_counter() - start)
            progress.update(bar, advance=1, loss=losses[-1], rate=rate)
    return model, losses, rate


# Generation


@nnx.jit
def next_token(model: GPT, tokens: jax.Array, position: jax.Array, key: jax.Array, temperature: float) -> jax.Array:
    """Feeds tokens [B, T] at a position, through the cache; returns a sample of what follows, [B, 1]."""
    logits = model(tokens, position)[:, -1:]
    return jax.random.categorical(key, logits / temperature)


def generate(model: GPT, prompt: np.ndarray, length: int, temperature: float, seed: int) -> list[int]:
    """The prompt, int32 [tokens], and what the model writes after it: `length` tokens together."""
    model.init_cache(batch=1)
    generated = prompt.tolist()
    tokens = jnp.asarray(prompt)[None]
    for key in jax.random.split(jax.random.key(seed), length - len(prompt)):
        position = jnp.int32(len(generated) - tokens.shape[1])
        tokens = next_token(model, tokens, position, key, temperature)
        generated.append(int(tokens[0, 0]))
    return generated


# Measurement


def measure(attention: Callable[..., jax.Array], shape: tuple[int, ...], kv_heads: int, dtype: Any) -> dict[str, float]:
    """Seconds, and bytes of temporaries, of causal attention forward and backward for a query [B, T, N, D]."""
    batch, length, _, dim = shape
    keys = jax.random.split(jax.random.key(0), 4)
    query, cotangent = (jax.random.normal(key, shape, dtype) for key in keys[:2])
    key, value = (jax.random.normal(key, (batch, length, kv_heads, dim), dtype) for key in keys[2:])

    def forward_and_backward(query: jax.Array, key: jax.Array, value: jax.Array, cotangent: jax.Array) -> Any:
        out, backward = jax.vjp(lambda *qkv: attention(*qkv, is_causal=True), query, key, value)
        return out, backward(cotangent)

    compiled = jax.jit(forward_and_backward).lower(query, key, value, cotangent).compile()
    seconds: list[float] = []
    while len(seconds) < 3 or (sum(seconds) < 1.0 and len(seconds) < 20):
        start = time.perf_counter()
        jax.block_until_ready(compiled(query, key, value, cotangent))
        seconds.append(time.perf_counter() - start)
    memory = compiled.memory_analysis()
    assert memory is not None
    return {"seconds": statistics.median(seconds[1:]), "bytes": float(memory.temp_size_in_bytes)}


def compare_attention(args: argparse.Namespace) -> list[dict[str, Any]]:
    """`jax_flash` against `jax.nn` at the shape of the training and at one long sequence; prints a table."""
    table = Table(
        "query [B, T, N, D]",
        title="Causal attention, forward and backward; the memory is that of XLA's temporaries",
        title_justify="left",
    )
    for column in ("jax_flash ms", "jax.nn ms", "faster", "jax_flash MiB", "jax.nn MiB", "smaller"):
        table.add_column(column, justify="right")
    rows = []
    for batch, length in ((args.batch, args.seq_len), (1, args.long_seq_len)):
        shape = (batch, length, args.heads, args.width // args.heads)
        with console.status(f"Measuring attention at {list(shape)} ..."):
            flash = measure(jax_flash.dot_product_attention, shape, args.kv_heads, args.dtype)
            standard = measure(jax.nn.dot_product_attention, shape, args.kv_heads, args.dtype)
        rows.append({"shape": shape, "jax_flash": flash, "jax_nn": standard})
        table.add_row(
            str(list(shape)),
            *(f"{cost['seconds'] * 1e3:,.1f}" for cost in (flash, standard)),
            f"{standard['seconds'] / flash['seconds']:.1f}x",
            *(f"{cost['bytes'] / 2**20:,.2f}" for cost in (flash, standard)),
            f"{standard['bytes'] / max(flash['bytes'], 1):,.0f}x",
        )
    console.print(table)
    return rows


def compare_models(args: argparse.Namespace, corpus: np.ndarray) -> dict[str, float]:
    """Tokens per second of training the same model, without dropout, on jax_flash, XLA's attention and cuDNN's."""
    rates = {}
    for name in ("flash", *JAX_NN):
        if name == "cudnn" and args.dtype == "float32":
            continue  # which cuDNN does not have
        variant = argparse.Namespace(**vars(args) | {"implementation": name, "dropout": 0.0})
        _, _, rates[name] = train(variant, corpus, args.compare_steps, f"{name:18}")
    return rates


def plot(losses: list[float], standard: list[float], path: Path) -> None:
    """Draw the loss curve, a smoothed curve, and the first steps compared with standard attention."""
    figure, (whole, first) = plt.subplots(1, 2, figsize=(11, 4), width_ratios=(2, 1), layout="constrained")
    window = max(1, len(losses) // 40)
    smooth = np.convolve(losses, np.ones(window) / window, mode="valid")
    whole.plot(losses, color="tab:blue", alpha=0.3)
    whole.plot(np.arange(len(smooth)) + window / 2, smooth, color="tab:blue")
    whole.set(title="A small GPT on Python's standard library", xlabel="step", ylabel="loss (nats per token)")
    first.plot(losses[: len(standard)], color="tab:blue", label="fused")
    first.plot(standard, "o", color="black", markersize=4, fillstyle="none", label="standard")
    first.set(title="The same curve as standard attention", xlabel="step")
    first.legend()
    for axes in (whole, first):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


# The command line


def parse_args() -> argparse.Namespace:
    summary, _, _ = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(description=summary, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=int, default=4)
    model.add_argument("--width", type=int, default=128)
    model.add_argument("--heads", type=int, default=4)
    model.add_argument(
        "--kv-heads",
        type=int,
        help="key/value heads; fewer than --heads for grouped-query attention; None: equal to --heads",
    )
    model.add_argument("--local-layers", type=int, default=2, help="number of first layers that attend within --window")
    model.add_argument("--window", type=int, default=4, help="number of previous tokens that a local layer sees")
    model.add_argument("--seq-len", type=int, default=512, help="context, in tokens")
    model.add_argument(
        "--vocabulary", type=int, default=1024, help="number of tokens: 128 characters, and frequent chunks"
    )
    dtypes = ("float32", "bfloat16")
    model.add_argument(
        "--dtype", choices=dtypes, help="dtype of the computation; None: bfloat16 on a GPU, else float32"
    )
    implementations = ("flash", "xla", "reference")
    model.add_argument(
        "--implementation", choices=implementations, help="implementation of attention; None: the fastest"
    )
    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=int, default=700)
    training.add_argument("--batch", type=int, default=2)
    training.add_argument("--learning-rate", type=float, default=3e-3)
    training.add_argument("--dropout", type=float, default=0.1, help="dropout rate of the attention weights")
    training.add_argument("--seed", type=int, default=0)
    checks = parser.add_argument_group("what comes after")
    checks.add_argument(
        "--compare-steps", type=int, default=20, help="number of steps to repeat with standard attention"
    )
    checks.add_argument(
        "--long-seq-len", type=int, default=4096, help="length of the longer sequence for measuring attention"
    )
    checks.add_argument("--prompt", default="class")
    checks.add_argument("--sample-length", type=int, help="tokens in the sample, at most --seq-len; None: --seq-len")
    checks.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--text-limit", type=int, help="largest number of characters to read; None: all")
    parser.add_argument("--output", type=Path, default=Path("demo_output"), help="output directory")
    args = parser.parse_args()

    if args.width % args.heads:
        parser.error(f"--heads {args.heads} must divide --width {args.width}")
    if not args.prompt or not args.prompt.isascii():
        parser.error(f"--prompt {args.prompt!r} must be one or more ASCII characters")
    if args.temperature <= 0:
        parser.error(f"--temperature {args.temperature} must be positive")
    if min(args.steps, args.compare_steps) < 1:
        parser.error("--steps and --compare-steps must be at least 1")
    args.kv_heads = args.kv_heads or args.heads
    args.sample_length = min(args.sample_length or args.seq_len, args.seq_len)
    args.compare_steps = min(args.compare_steps, args.steps)
    args.dtype = args.dtype or ("bfloat16" if jax.default_backend() == "gpu" else "float32")
    return args


def main() -> None:
    args = parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()

    text = read_standard_library()[: args.text_limit]
    vocabulary = Vocabulary(text, args.vocabulary)
    args.vocabulary = len(vocabulary.pieces)  # a short text has fewer chunks
    corpus, prompt = vocabulary.encode(text), vocabulary.encode(args.prompt)
    if len(corpus) <= args.seq_len:
        raise SystemExit(f"the text has {len(corpus)} tokens, too few for --seq-len {args.seq_len}")
    if len(prompt) >= args.sample_length:
        raise SystemExit(f"--prompt has {len(prompt)} tokens, too many for --sample-length {args.sample_length}")
    device = jax.devices()[0]
    console.print(
        f"[bold]Text[/]    Python's standard library, {len(text) / 1e6:.1f} MB, {len(corpus) / 1e6:.1f} M tokens"
    )
    console.print(f"[bold]Device[/]  {device.device_kind} ({device.platform}), jax {jax.__version__}, {args.dtype}")

    size = f"{args.steps} steps of {args.batch} x {args.seq_len} tokens, dropout {args.dropout}"
    console.print(f"\n[bold]1. Train[/]: {size} (the first step compiles)")
    model, losses, rate = train(args, corpus, args.steps, "fused attention   ")
    parameters = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    final = statistics.mean(losses[-20:])
    console.print(f"{parameters / 1e6:.2f} M parameters, loss {losses[0]:.2f} -> {final:.2f}, {rate:,.0f} tokens/s")

    console.print(
        f"\n[bold]2. The same curve?[/] {args.compare_steps} steps again with materialised attention and the same seed"
    )
    standard_args = argparse.Namespace(**vars(args) | {"implementation": "reference"})
    _, standard_losses, standard_rate = train(standard_args, corpus, args.compare_steps, "standard attention")
    difference = float(np.max(np.abs(np.subtract(losses[: args.compare_steps], standard_losses))))
    console.print(f"Largest difference between the two loss curves: [bold]{difference:.1e}[/]")

    console.print("\n[bold]3. What attention costs[/]: time and temporary memory, against XLA's standard attention")
    costs = compare_attention(args)
    rates = compare_models(args, corpus) if device.platform == "gpu" else {}
    for name, other in list(rates.items())[1:]:
        ratio = rates["flash"] / other
        console.print(f"Training the whole model is {ratio:.2f}x as fast as with {name} ({other:,.0f} tokens/s)")

    console.print(f"\n[bold]4. A sample[/], at temperature {args.temperature}, decoded through the cache")
    sample = vocabulary.decode(generate(model, prompt, args.sample_length, args.temperature, args.seed))
    console.print(sample, markup=False, highlight=False, style="cyan")

    plot(losses, standard_losses, args.output / "loss.png")
    (args.output / "sample.txt").write_text(sample)
    results = {
        "losses": losses,
        "standard_losses": standard_losses,
        "largest_difference": difference,
        "tokens_per_second": rate,
        "standard_tokens_per_second": standard_rate,
        "parameters": parameters,
        "attention": costs,
        "tokens_per_second_without_dropout": rates,
        "seconds": time.perf_counter() - started,
    }
    (args.output / "results.json").write_text(json.dumps(results, indent=2))
    console.print(f"\nWrote loss.png, sample.txt and results.json to {args.output}/ after {results['seconds']:.0f} s")


if __name__ == "__main__":
    main()
