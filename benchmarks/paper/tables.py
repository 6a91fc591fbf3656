"""The tables of docs/paper.md about attention itself: of what `python -m benchmarks.paper` has measured."""

import re
from collections.abc import Collection, Iterator, Sequence

from cells import Results, Row, Rows, number, one, shows, table

FLASH, STANDARD, XLA = "jax_flash", "standard", "xla"
PLAIN = "without_dropout"  # jax_flash, to compare with what has no dropout
BOTH = "forward + backward"
NAMES = {
    STANDARD: "standard attention",
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
    """Of a table that says of each cell or line whether there is dropout."""
    return NAMES[name].removesuffix(", no dropout")


def names_in(rows: Rows, field: str) -> list[str]:
    return [name for name in NAMES if any(row[field] == name for row in rows)]


# --- the problem of GPT-2 medium --------------------------------------------------------------------------------------


@shows("paper_gpt2_problem")
def paper_gpt2_problem(results: Results) -> str:
    rows, model = results["rows"], results["model"]

    def of(name: str, pass_: str, dropout: bool) -> Row:
        return one(rows, implementation=name, mask=True, dropout=dropout, pass_=pass_)

    def compared(what: str, both: Sequence[float | None], digits: int = 1) -> list[str]:
        standard, flash = both
        return [what, number(standard, digits), number(flash, digits), times(standard, flash, 2)]

    def modelled(field: str, *names: str) -> list[float]:
        return [model[name][field] / 1e9 for name in names]

    def measured(pass_: str, dropout: bool) -> list[str]:
        """Beside the faster of standard attention and, where there is no dropout, XLA's through jax.nn."""
        what = f"milliseconds, {pass_}, padding {'and dropout' if dropout else 'alone'}"
        baselines = [of(name, pass_, dropout)["milliseconds"] for name in (STANDARD, *([] if dropout else [XLA]))]
        fastest = min((x for x in baselines if x is not None), default=None)
        return compared(what, (fastest, of(FLASH, pass_, dropout)["milliseconds"]), 2)

    xla_bytes = of(STANDARD, BOTH, True).get("xla_bytes")
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
                "GB that XLA counts of its program, calls of cuBLAS aside",
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
        [BOTH, "GB read", "GB written", "standard ÷ this", "10⁹ instructions of a warp", "over neither"],
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
        of_kind = sum(row[field] for row in results["rows"] if row["class"] == kind)
        return 100 * of_kind / sum(row[field] for row in results["rows"])

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
        ["blocks kept", *(f"milliseconds, {pass_} (times as fast)" for pass_ in ("forward", BOTH))],
        [["all", *dense], *([mask, cell(mask, "forward"), cell(mask, BOTH)] for mask in fractions)],
    )
    return f"{blocks}\n\n{sparsity}"


def at(results: Results, method: str, length: int, field: str) -> float | None:
    """Of a row of figure3.py; nothing where the method has failed."""
    return one(results["rows"], method=method, length=length)[field]


def lengths_of(results: Results) -> list[int]:
    return sorted({row["length"] for row in results["rows"]})


def longest(results: Results, *methods: str) -> int | None:
    """Of the lengths at which all of them ran."""
    ran = [n for n in lengths_of(results) if all(at(results, x, n, "milliseconds") is not None for x in methods)]
    return max(ran, default=None)


def crossover(results: Results, method: str) -> str:
    """From which length on it is faster than jax_flash."""
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
        """Of the lengths up to 2048 at which both ran."""
        found = {n: [at(results, x, n, "milliseconds") for x in (baseline, flash)] for n in lengths_of(results)}
        return {n: x[0] / x[1] for n, x in found.items() if n <= 2048 and x[0] and x[1]}

    beside_standard, beside_xla = ratios(STANDARD, FLASH), ratios(XLA, PLAIN)
    least = [min(ratio, beside_xla.get(n, ratio)) for n, ratio in beside_standard.items()]
    claims = table(
        ["", "the paper", "here"],
        [
            ["times as fast as standard attention, N = 128 to 2048", "up to 3", spread(beside_standard.values())],
            ["as XLA's through jax.nn, neither with dropout", "–", spread(beside_xla.values())],
            ["as the faster of the two at each length", "–", spread(least)],
            *([f"{NAMES[x]} is faster", "from N = 512 to 1024 on", crossover(results, x)] for x in APPROXIMATE),
            *(
                [f"memory of {NAMES[x]} ÷ ours", paper, ratio_at_longest(results, x, "bytes")]
                for x, paper in {STANDARD: "up to 20", "chunked": "–", "linformer": "2"}.items()
            ),
            ["the longest sequence that runs", "65536", str(longest(results, FLASH) or "–")],
        ],
    )
    return "\n\n".join([claims, *time_and_memory(results)])


def spread(ratios: Collection[float]) -> str:
    return f"{min(ratios):.1f} to {max(ratios):.1f}" if ratios else "–"


def out_of_memory(row: Row) -> bool:
    """Whether that is why the method of the row has no time."""
    return (
        row["failure"] is not None and re.search("RESOURCE_EXHAUSTED|out of memory", row["failure"], re.I) is not None
    )


def time_and_memory(results: Results) -> list[str]:
    """Two tables, of all methods and lengths."""
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
