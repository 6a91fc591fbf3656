"""The tables of docs/paper.md, from the results of `python -m benchmarks.paper`."""

import re
import statistics
from collections.abc import Callable, Collection, Iterator, Sequence

from cells import Listing, Results, Row, Rows, declare, number, one, shows, table, with_count

FLASH, STANDARD, RBG, XLA = "jax_flash", "standard", "standard_rbg", "xla"
PLAIN = "without_dropout"  # jax_flash, for comparison with methods without dropout
BOTH = "forward + backward"
NAMES = {
    STANDARD: "standard attention",
    RBG: "standard attention, mask by rbg",
    "checkpointed": "standard attention, checkpointed",
    XLA: "jax.nn by XLA, no dropout",
    "chunked": "Rabe and Staats",
    "cudnn": "cuDNN, no dropout",
    FLASH: "jax_flash",
    PLAIN: "jax_flash, no dropout",
    "butterfly": "jax_flash, butterfly",
    "bigbird": "jax_flash, BigBird",
    "longformer": "jax_flash, Longformer",
    "linformer": "Linformer",
    "local": "local attention",
}
FEATURES = {"neither": (False, False), "mask": (True, False), "dropout": (False, True), "both": (True, True)}
APPROXIMATE = ("linformer", "local")


def milliseconds(x: float | None) -> str:
    return "–" if x is None else f"{x:.3f}" if x < 10 else f"{x:.0f}"


def times(above: float | None, below: float | None, digits: int = 1) -> str:
    return "–" if above is None or below is None else number(above / below, digits)


def feature_name(name: str) -> str:
    """Return a name for tables that state for each cell or line whether there is dropout."""
    return NAMES[name].removesuffix(", no dropout")


def names_in(rows: Rows, field: str) -> list[str]:
    return [name for name in NAMES if any(row[field] == name for row in rows)]


# --- the problem of GPT-2 medium --------------------------------------------------------------------------------------


@shows("paper_gpt2_problem")
def paper_gpt2_problem(results: Results) -> str:
    rows, model = results["rows"], results["model"]

    def row_of(name: str, pass_: str, dropout: bool) -> Row:
        return one(rows, implementation=name, mask=True, dropout=dropout, pass_=pass_)

    def compared(what: str, both: Sequence[float | None], digits: int = 1) -> list[str]:
        standard, flash = both
        return [what, number(standard, digits), number(flash, digits), times(standard, flash, 2)]

    def modelled(field: str, *names: str) -> list[float]:
        return [model[name][field] / 1e9 for name in names]

    def measured(pass_: str, dropout: bool) -> list[str]:
        """Compare with the fastest of XLA's attention and standard attention with either generator."""
        what = f"milliseconds, {pass_}, padding {'and dropout' if dropout else 'only'}"
        same = {"pass": pass_, "mask": True, "dropout": dropout}
        baselines = [find(rows, implementation=x, **same).get("milliseconds") for x in (STANDARD, RBG, XLA)]
        fastest = min((x for x in baselines if x is not None), default=None)
        return compared(what, (fastest, row_of(FLASH, pass_, dropout)["milliseconds"]), 2)

    xla_bytes = row_of(STANDARD, BOTH, True).get("xla_bytes")
    comparison = table(
        ["", "standard attention", "FlashAttention", "standard ÷ FlashAttention"],
        [
            compared("the paper: GFLOPs", (66.6, 75.2)),
            compared("the paper: GB of HBM", (40.3, 4.4)),
            compared("the paper: milliseconds, forward + backward, A100", (41.7, 7.3)),
            compared("GFLOPs of the products", modelled("flops", STANDARD, "flash"), 0),
            compared("GB that the algorithms move", modelled("bytes", STANDARD, "flash")),
            compared("the same, in the kernels' order", modelled("bytes", STANDARD, FLASH)),
            [
                "GB that XLA counts for its program, without calls of cuBLAS",
                number(xla_bytes and xla_bytes / 1e9, 1),
                "–",
                "–",
            ],
            *(measured(pass_, dropout) for pass_ in ("forward", BOTH) for dropout in (True, False)),
        ],
    )

    def cells(name: str, pass_: str) -> Iterator[str]:
        found = [row for row in rows if row["implementation"] == name and row["pass"] == pass_]
        for mask, dropout in FEATURES.values():
            row = next((row for row in found if (row["mask"], row["dropout"]) == (mask, dropout)), None)
            yield "–" if row is None else number(row["milliseconds"])

    features = table(
        ["milliseconds", *FEATURES],
        (
            [f"{feature_name(name)}, {pass_}", *cells(name, pass_)]
            for pass_ in ("forward", BOTH)
            for name in names_in(rows, "implementation")
        ),
    )
    return f"{comparison}\n\n{features}"


@shows("paper_gpt2_counters")
def paper_gpt2_counters(results: Results) -> str:
    rows = {(row["implementation"], row["mask"], row["dropout"]): row for row in results["rows"]}

    def moved(row: Row | None) -> float | None:
        return None if row is None else row["bytes_read"] + row["bytes_written"]

    def line(row: Row) -> list[str]:
        name, has = row["implementation"], (row["mask"], row["dropout"])
        feature = next(feature for feature, flags in FEATURES.items() if flags == has)
        plain = rows.get((name, False, False))
        return [
            f"{feature_name(name)}, {feature}",
            *(number(row[key] / 1e9) for key in ("bytes_read", "bytes_written")),
            times(moved(rows.get((STANDARD, *has))), moved(row)),
            number(row["instructions"] / 1e9),
            "–" if plain is None else number(row["instructions"] / plain["instructions"]),
        ]

    counted = table(
        [BOTH, "GB read", "GB written", "standard ÷ this", "10⁹ warp instructions", "relative to neither"],
        map(line, rows.values()),
    )
    return "\n\n".join([counted, *(f"Not counted, {what}: {why}" for what, why in results.get("missing", {}).items())])


@shows("paper_gpt2_operators")
def paper_gpt2_operators(results: Results) -> str:
    published = {  # Ivanov et al. 2021, table 1: a layer of BERT-large on a V100
        "tensor contraction": (99.80, 61.0),
        "statistical normalisation": (0.17, 25.5),
        "element-wise": (0.03, 13.5),
    }

    def share(kind: str, field: str) -> float:
        of_class = sum(row[field] for row in results["rows"] if row["class"] == kind)
        return 100 * of_class / sum(row[field] for row in results["rows"])

    return table(
        ["class of operator", "% of FLOPs", "% of time", "Ivanov et al.: % of FLOPs", "% of time"],
        (
            [kind, number(share(kind, "flops")), number(share(kind, "milliseconds"), 1), number(flops), number(time, 1)]
            for kind, (flops, time) in published.items()
        ),
    )


# --- figures 2 and 3 --------------------------------------------------------------------------------------------------


def part_of(results: Results, part: str) -> Rows:
    return [row for row in results["rows"] if row["part"] == part]


@shows("paper_figure2")
def paper_figure2(results: Results) -> str:
    blocks = table(
        ["key block", "GB that Algorithm 1 moves", "milliseconds in plain JAX"],
        (
            [str(row["block"]), number(row["bytes"] / 1e9), number(row["milliseconds"])]
            for row in part_of(results, "blocks")
        ),
    )
    rows = part_of(results, "sparsity")
    fractions = dict.fromkeys(row["mask"] for row in rows)

    def cell(mask: str, pass_: str) -> str:
        row = one(rows, mask=mask, pass_=pass_)
        return f"{row['milliseconds']:.3f} ({row['speedup']:.1f})"

    dense = [number(one(rows, mask=next(iter(fractions)), pass_=x)["dense_milliseconds"], 3) for x in ("forward", BOTH)]
    sparsity = table(
        ["blocks kept", *(f"milliseconds, {pass_} (speed-up)" for pass_ in ("forward", BOTH))],
        [["all", *dense], *([mask, cell(mask, "forward"), cell(mask, BOTH)] for mask in fractions)],
    )
    return f"{blocks}\n\n{sparsity}"


def at(results: Results, method: str, length: int, field: str) -> float | None:
    """Return a field of a row of figure3.py. It is None if the method failed."""
    return one(results["rows"], method=method, length=length)[field]


def lengths_of(results: Results) -> list[int]:
    return sorted({row["length"] for row in results["rows"]})


def longest(results: Results, *methods: str) -> int | None:
    """Return the largest length at which all methods ran."""
    ran = [n for n in lengths_of(results) if all(at(results, x, n, "milliseconds") is not None for x in methods)]
    return max(ran, default=None)


def crossover(results: Results, method: str) -> str:
    """Return from which length on a method is faster than jax_flash."""
    slower = [
        n
        for n in lengths_of(results)
        if (other := at(results, method, n, "milliseconds")) is None
        or other >= (at(results, FLASH, n, "milliseconds") or 0)
    ]
    faster = [n for n in lengths_of(results) if n > max(slower, default=0)]
    return f"from N = {min(faster)} on" if faster else "nowhere"


def ratio_at_longest(results: Results, method: str, field: str) -> str:
    length = longest(results, method, FLASH)
    if length is None:
        return "–"
    return f"{times(at(results, method, length, field), at(results, FLASH, length, field))} (N = {length})"


@shows("paper_figure3")
def paper_figure3(results: Results) -> str:
    def ratios(baseline: str, flash: str) -> dict[int, float]:
        """Return the ratios at the lengths up to 2048 at which both ran."""
        found = {n: [at(results, x, n, "milliseconds") for x in (baseline, flash)] for n in lengths_of(results)}
        return {n: x[0] / x[1] for n, x in found.items() if n <= 2048 and x[0] and x[1]}

    over_standard, over_xla = ratios(STANDARD, FLASH), ratios(XLA, PLAIN)
    least = [min(ratio, over_xla.get(n, ratio)) for n, ratio in over_standard.items()]
    claims = table(
        ["", "the paper", "here"],
        [
            ["speed-up over standard attention, N = 128 to 2048", "up to 3", spread(over_standard.values())],
            ["speed-up over XLA through jax.nn, both without dropout", "–", spread(over_xla.values())],
            ["speed-up over the faster of the two at each length", "–", spread(least)],
            *([f"{NAMES[x]} is faster", "from N = 512 to 1024 on", crossover(results, x)] for x in APPROXIMATE),
            *(
                [f"memory of {NAMES[x]} ÷ jax_flash", paper, ratio_at_longest(results, x, "bytes")]
                for x, paper in {STANDARD: "up to 20", "chunked": "–", "linformer": "2"}.items()
            ),
            ["longest sequence that runs", "65536", str(longest(results, FLASH) or "–")],
        ],
    )
    return "\n\n".join([claims, *time_and_memory(results)])


def spread(ratios: Collection[float]) -> str:
    return f"{min(ratios):.1f} to {max(ratios):.1f}" if ratios else "–"


def out_of_memory(row: Row) -> bool:
    """Return whether the method of the row failed because of memory."""
    return (
        row["failure"] is not None and re.search("RESOURCE_EXHAUSTED|out of memory", row["failure"], re.I) is not None
    )


def time_and_memory(results: Results) -> list[str]:
    """Return a table of times and one of memory, for all methods and lengths."""
    lengths = lengths_of(results)

    def time(row: Row) -> str:
        return "out of memory" if out_of_memory(row) else milliseconds(row["milliseconds"])

    def memory(row: Row) -> str:
        return "–" if row["bytes"] is None else f"{row['bytes'] / 2**20:.0f}"

    return [
        table(
            [unit, *(f"N = {length}" for length in lengths)],
            (
                [NAMES[method], *(cell(one(results["rows"], method=method, length=length)) for length in lengths)]
                for method in names_in(results["rows"], "method")
            ),
        )
        for unit, cell in {"milliseconds": time, "MiB": memory}.items()
    ]


@shows("paper_checkpointing")
def paper_checkpointing(results: Results) -> str:
    return "\n\n".join(time_and_memory(results))


# --- memory -----------------------------------------------------------------------------------------------------------


@shows("paper_memory")
def paper_memory(results: Results) -> str:
    rows = {(row["method"], row["length"]): row for row in results["rows"]}
    lengths = lengths_of(results)

    def cell(method: str, length: int) -> str:
        row = rows.get((method, length))
        if row is None:
            return "–"
        return " / ".join("–" if row[x] is None else f"{row[x] / 2**20:.1f}" for x in ("planned", "allocated"))

    return table(
        ["MiB, planned / allocated", *(f"N = {length}" for length in lengths)],
        (
            [NAMES[method], *(cell(method, length) for length in lengths)]
            for method in names_in(results["rows"], "method")
        ),
    )


# --- training ---------------------------------------------------------------------------------------------------------


ATTENTIONS = {
    "standard": NAMES[STANDARD],
    "cudnn": "cuDNN",
    "flash": NAMES[FLASH],
    "block-sparse": "jax_flash, block-sparse",
}
SPEED = "tokens_per_second"
PAPERS_DROPOUT = 0.1
CURVES = ("training", "held_out")


def find(rows: Rows, **fields: object) -> Row:
    """Return the row with these fields, or an empty row if it does not exist."""
    return next((row for row in rows if all(row.get(key) == value for key, value in fields.items())), {})


def relative_to_standard(rows: Rows, row: Row) -> str:
    """Return the tokens per second relative to standard attention with the same dropout."""
    same = {key: row.get(key) for key in ("task", "length", "dropout", "attention_dropout")}
    return times(row.get(SPEED), find(rows, attention="standard", **same).get(SPEED), 2)


def training_steps(rows: Rows, name: Callable[[Row], str]) -> str:
    def line(row: Row) -> list[str]:
        what = [name(row), ATTENTIONS[row["attention"]]]
        if row["attention_dropout"] != row["dropout"]:
            what.append("no dropout in attention")
        rate, share, size = (row.get(key) for key in (SPEED, "model_flop_utilisation", "bytes"))
        return [
            ", ".join(what),
            str(row["batch"]),
            "out of memory" if out_of_memory(row) else number(row.get("steps_per_second")),
            number(rate and rate / 1e3, 1),
            number(share and 100 * share, 1),
            number(size and size / 1e9, 1),
            relative_to_standard(rows, row),
        ]

    head = [
        "",
        "batch",
        "steps/s",
        "1000 tokens/s",
        "% of peak FLOP/s",
        "GB",
        "speed-up over standard attention",
    ]
    return table(head, map(line, rows))


def length_and_dropout(row: Row) -> str:
    return f"N = {row['length']}, dropout {row['dropout']:g}"


def gpt2_speeds(results: Results, paper: dict[int, str]) -> str:
    """Compare with the paper's numbers for each length."""
    rows = results["rows"]

    def rate(attention: str, length: int) -> float | None:
        return find(rows, attention=attention, length=length, dropout=PAPERS_DROPOUT).get(SPEED)

    claims = table(
        [f"speed-up (tokens/s) over standard attention with N = 1024, dropout {PAPERS_DROPOUT}", "the paper", "here"],
        (
            [f"jax_flash, N = {length}", figure, times(rate("flash", length), rate("standard", 1024), 2)]
            for length, figure in paper.items()
        ),
    )
    return f"{claims}\n\n{training_steps(rows, length_and_dropout)}"


@shows("paper_gpt2_small")
def paper_gpt2_small(results: Results) -> str:
    return gpt2_speeds(results, {1024: "1.7 (Megatron-LM), 3.5 (Hugging Face)", 2048: "1.6", 4096: "1.3"})


@shows("paper_gpt2_medium")
def paper_gpt2_medium(results: Results) -> str:
    return gpt2_speeds(results, {1024: "1.7 (Megatron-LM), 3.0 (Hugging Face)", 2048: "–", 4096: "–"})


@shows("paper_gpt2_curves")
def paper_gpt2_curves(results: Results) -> str:
    gaps = table(
        [f"largest gap between losses in {results['steps']} steps", "training, all steps", "held out"],
        (
            [" and ".join(ATTENTIONS[x] for x in pair.split(" and ")), *(number(gap[x], 4) for x in CURVES)]
            for pair, gap in results["largest_gap"].items()
        ),
    )
    last = table(
        [f"loss after {results['steps']} steps, nats per byte", "training", "held out"],
        (
            [ATTENTIONS[row["attention"]], *(number(None if row["failure"] else row[x][-1], 4) for x in CURVES)]
            for row in results["rows"]
        ),
    )
    return f"{gaps}\n\n{last}\n\n{text_of(results)}"


def text_of(results: Results) -> str:
    trained, held_out = (f"{results[key] / 1e6:.1f}" for key in ("training_bytes", "held_out_bytes"))
    return f"The text has {trained} MB to train on, and {held_out} MB are held out."


@shows("paper_sparse_mlp")
def paper_sparse_mlp(results: Results) -> str:
    def line(model: str) -> list[str]:
        rows = [row for row in results["rows"] if row["model"] == model]
        loss, speed = (results[f"{field}_of"][model] for field in ("held_out", "tokens_per_second"))
        parameters = f"{rows[0]['parameters'] / 1e6:.0f} million"
        rate = f"{speed['mean'] / 1e3:.0f} ({speed['spread'] / 1e3:.1f})"
        return [model, parameters, rate, f"{loss['mean']:.4f} ({loss['spread']:.4f})"]

    models = dict.fromkeys(row["model"] for row in results["rows"])
    head = ["mean (spread) of the seeds", "parameters", "1000 tokens/s", "held-out loss, nats per byte"]
    return table(head, map(line, models))


@shows("paper_gpt2_context")
def paper_gpt2_context(results: Results) -> str:
    rows, difference = results["rows"], results["difference"]
    lengths, seeds = lengths_of(results), sorted({row["seed"] for row in rows})

    def milliseconds_a_step(length: int) -> float:
        return 1e3 * statistics.mean(row["seconds_a_step"] for row in rows if row["length"] == length)

    def line_of(seed: int) -> list[str]:
        both = [one(rows, seed=seed, length=length)["perplexity"] for length in lengths]
        return [f"perplexity per byte, seed {seed}", *(f"{x:.4f}" for x in both), f"{both[1] - both[0]:+.4f}"]

    def spread_of(values: dict[str, float]) -> str:
        return f"{values['spread']:.4f}"

    low, high = difference["interval"]
    by_length = [results["perplexity"][str(length)] for length in lengths]
    compared = table(
        ["", *(f"N = {length}" for length in lengths), "difference"],
        [
            ["the paper: perplexity per token, N = 1024 and 4096", "18.2", "17.5", "-0.7"],
            *map(line_of, seeds),
            ["mean of the seeds", *(f"{x['mean']:.4f}" for x in by_length), f"{difference['mean']:+.4f}"],
            ["standard deviation", *map(spread_of, by_length), spread_of(difference)],
            [f"{100 * difference['confidence']:g}% interval of the mean", "–", "–", f"{low:+.4f} to {high:+.4f}"],
            ["milliseconds per step", *(number(milliseconds_a_step(length), 0) for length in lengths), "–"],
        ],
    )
    size, steps = results["bytes_seen"] / 1e6, results["steps"]
    trained = f"Each model was trained on {size:.1f} MB, half of them in its own {steps} steps."
    return f"{compared}\n\n{text_of(results)} {trained}"


@shows("paper_bert")
def paper_bert(results: Results) -> str:
    rows = results["rows"]
    flash = find(rows, attention="flash", dropout=PAPERS_DROPOUT)
    ratio = relative_to_standard(rows, flash)
    claim = table(
        [f"BERT-large, dropout {PAPERS_DROPOUT}", "the paper", "here"],
        [["speed-up", "1.15 (over NVIDIA's MLPerf 1.1)", f"{ratio} (over standard attention)"]],
    )
    return f"{claim}\n\n{training_steps(rows, length_and_dropout)}"


@shows("paper_lra_speed")
def paper_lra_speed(results: Results) -> str:
    rows = results["rows"]
    tasks = list(dict.fromkeys(row["task"] for row in rows))

    def ratio(attention: str, task: str) -> float | None:
        rate, standard = (find(rows, attention=x, task=task).get(SPEED) for x in (attention, "standard"))
        return rate / standard if rate and standard else None

    def line(attention: str, paper: str) -> list[str]:
        ratios = [ratio(attention, task) for task in tasks]
        ran = [x for x in ratios if x is not None]
        mean = statistics.geometric_mean(ran) if len(ran) == len(tasks) else None
        return [ATTENTIONS[attention], paper, number(mean), *map(number, ratios)]

    claims = table(
        ["speed-up over standard attention", "the paper", "geometric mean", *tasks],
        [line("flash", "2.4"), line("block-sparse", "2.8")],
    )
    kept = [f"{100 * find(rows, task=task)['kept_blocks']:.0f}% ({task})" for task in tasks]
    steps = training_steps(rows, lambda row: f"{row['task']}, N = {row['length']}")
    return f"{claims}\n\nThe block-sparse mask keeps this share of the blocks: {', '.join(kept)}.\n\n{steps}"


@shows("paper_lra_accuracy")
def paper_lra_accuracy(results: Results) -> str:
    paper = {("listops", "standard"): "36.0", ("listops", "flash"): "37.6", ("listops", "block-sparse"): "37.0"}
    groups: dict[tuple[str, str], Rows] = {}
    for row in results["rows"]:
        groups.setdefault((row["task"], row["attention"]), []).append(row)
    seeds = sorted({row["seed"] for row in results["rows"]})

    def line(task: str, attention: str, rows: Rows) -> list[str]:
        ran = [row for row in rows if row["failure"] is None]
        return [
            f"{task}, {ATTENTIONS[attention]}",
            paper.get((task, attention), "–"),
            number(100 * ran[0]["chance"] if ran else None, 1),
            *(accuracy(find(ran, seed=seed)) for seed in seeds),
            number(100 * statistics.mean(row["accuracy"] for row in ran) if len(ran) == len(seeds) else None, 1),
        ]

    return table(
        ["% correct (99% interval)", "the paper", "largest class", *(f"seed {seed}" for seed in seeds), "mean"],
        (line(*names, rows) for names, rows in groups.items()),
    )


def accuracy(row: Row) -> str:
    """Return the accuracy in percent with its interval, or a dash if the row was not tested."""
    if "accuracy" not in row:
        return "–"
    low, high = row["interval"]
    return f"{100 * row['accuracy']:.1f} ({100 * low:.1f} to {100 * high:.1f})"


PAPERS_ACCURACY = {32: "72.7", 128: "61.4 (Path-X)", 256: "63.1 (Path-256)"}  # by side

declare({
    "paper pathfinder discs": ["paper_pathfinder_discs", Listing({
        "images": "{side} × {side}".format_map,
        "% correct from the discs only (99%)": accuracy,
    })],
    # The stages are in order: each resumes from the checkpoint of the previous one.
    "paper pathfinder": ["paper_pathfinder", Listing({
        "images": "{side} × {side}, N = {length}".format_map,
        "trained on": lambda row: "pixels and labels" if row["targets"] else "labels only",
        "attention": lambda row: f"{ATTENTIONS[row['attention']]}, {100 * row['kept_blocks']:.0f}% of the blocks",
        "GPU": lambda row: with_count(row["devices"], row["device"]),
        "steps": "{steps}".format_map,
        "1000 images seen": lambda row: number(row["images_seen"] / 1e3, 1),
        "minutes": lambda row: number(row["seconds"] / 60, 1),
        "last loss": lambda row: number(row["training"][-1], 3),
        "the paper: % correct": lambda row: PAPERS_ACCURACY.get(row["side"], "–"),
        "here (99%)": accuracy,
    })],
})  # fmt: skip
