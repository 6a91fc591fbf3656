"""The first table of docs/paper.md: each claim of the paper, its figure, ours, and the command that measures it."""

import statistics

from cells import Results, number, one, shows, table

from paper.tables import (
    BOTH,
    FLASH,
    PAPERS_DROPOUT,
    SPEED,
    STANDARD,
    accuracy,
    crossover,
    find,
    longest,
    ratio_at_longest,
    relative_to_standard,
    times,
)

FILES = (
    "gpt2_counters gpt2_problem gpt2_operators figure2 figure3 checkpointing memory gpt2_small gpt2_medium gpt2_curves "
    "gpt2_context bert lra_speed lra_accuracy pathfinder"
).split()


@shows(*(f"paper_{name}" for name in FILES))
def paper_claims(*results: Results) -> str:
    named = dict(zip(FILES, results, strict=True))

    def rows_of(name: str) -> list[Results]:
        return named[name]["rows"]

    def bytes_moved() -> str:
        standard, flash = (
            one(rows_of("gpt2_counters"), implementation=name, mask=True, dropout=True) for name in (STANDARD, FLASH)
        )
        moved = [(row["bytes_read"] + row["bytes_written"]) / 1e9 for row in (standard, flash)]
        return f"{moved[0]:.1f} GB, {moved[1]:.1f} GB: 1/{moved[0] / moved[1]:.1f}"

    def flops() -> str:
        model = named["gpt2_problem"]["model"]
        standard, flash = (model[name]["flops"] / 1e9 for name in (STANDARD, "flash"))
        return f"{standard:.0f} and {flash:.0f} GFLOPs: {flash / standard:.2f} times"

    def problem(pass_: str) -> str:
        same = {"mask": True, "dropout": True, "pass": pass_}
        found = [find(rows_of("gpt2_problem"), implementation=x, **same) for x in (STANDARD, "standard_rbg", FLASH)]
        *standard, flash = (row["milliseconds"] for row in found)
        return f"{min(standard):.1f} and {flash:.1f} ms: {min(standard) / flash:.1f} times as fast"

    def operators() -> str:
        rows = rows_of("gpt2_operators")
        others = [row for row in rows if row["class"] != "tensor contraction"]
        flops, time = (
            100 * sum(row[key] for row in others) / sum(row[key] for row in rows) for key in ("flops", "milliseconds")
        )
        return f"{flops:.1f}% of FLOPs, {time:.0f}% of time"

    def blocks() -> str:
        rows = [row for row in rows_of("figure2") if row["part"] == "blocks"]
        times_ = [row["milliseconds"] for row in rows]
        fell = all(later < earlier for earlier, later in zip(times_, times_[1:], strict=False))
        return f"{'to' if fell else 'not to'} a block of {rows[-1]['block']}"

    def sparsity() -> str:
        row = one(rows_of("figure2"), part="sparsity", mask="1/32", pass_=BOTH)
        return f"{row['speedup']:.1f} times as fast with 1/32 of the blocks"

    def figure3_speed() -> str:
        rows = rows_of("figure3")
        ratios = [
            one(rows, method=STANDARD, length=n)["milliseconds"] / one(rows, method=FLASH, length=n)["milliseconds"]
            for n in (128, 256, 512, 1024, 2048)
        ]
        return f"{min(ratios):.1f} to {max(ratios):.1f} times"

    def checkpointing() -> str:
        def milliseconds(method: str) -> float:
            return one(rows_of("checkpointing"), method=method, length=8192)["milliseconds"]

        ratios = [milliseconds(name) / milliseconds(STANDARD) for name in ("checkpointed", FLASH)]
        return f"N = 8192: checkpointing takes {ratios[0]:.1f} times as long, FlashAttention 1/{1 / ratios[1]:.1f}"

    def memory() -> str:
        shorter, longer = (
            one(rows_of("memory"), method=FLASH, length=n)["allocated"] / 2**20 for n in (131072, 262144)
        )
        return f"{shorter:.0f} MiB for N = 131072, {longer:.0f} MiB for 262144"

    def training(name: str, length: int, standard: int) -> str:
        flash, baseline = (
            find(rows_of(name), attention=attention, length=n, dropout=PAPERS_DROPOUT).get(SPEED)
            for attention, n in (("flash", length), ("standard", standard))
        )
        return f"{times(flash, baseline, 2)} times standard attention"

    def curves() -> str:
        gap = named["gpt2_curves"]["largest_gap"]["standard and flash"]["held_out"]
        return f"held-out losses differ by up to {gap:.3f} nats per byte"

    def context() -> str:
        means = [named["gpt2_context"]["perplexity"][n]["mean"] for n in ("1024", "4096")]
        return f"{means[0]:.2f} and {means[1]:.2f} per byte"

    def bert() -> str:
        rows = rows_of("bert")
        ratio = relative_to_standard(rows, find(rows, attention="flash", dropout=PAPERS_DROPOUT))
        return f"{ratio} times standard attention"

    def arena(attention: str) -> str:
        rows = rows_of("lra_speed")
        ratios = [
            row[SPEED] / one(rows, task=row["task"], attention="standard")[SPEED]
            for row in rows
            if row["attention"] == attention
        ]
        return f"{statistics.geometric_mean(ratios):.1f}"

    def listops() -> str:
        rows = [row for row in rows_of("lra_accuracy") if row["task"] == "listops"]
        means = [
            number(100 * statistics.mean(row["accuracy"] for row in rows if row["attention"] == attention), 1)
            for attention in ("standard", "flash", "block-sparse")
        ]
        return f"{means[0]}% standard, {means[1]}%, {means[2]}% block-sparse"

    def pathfinder() -> str:
        return " and ".join(accuracy(one(rows_of("pathfinder"), side=side)).split(" ")[0] + "%" for side in (128, 256))

    figure3 = named["figure3"]
    claims: list[tuple[str, str, str, str, str]] = [
        (
            "figure 2, left",
            "bytes read from and written to HBM, forward + backward, GPT-2 medium",
            "40.3 GB, 4.4 GB: 1/9.2",
            bytes_moved(),
            "gpt2_counters",
        ),
        ("figure 2, left", "FLOPs", "66.6 and 75.2 GFLOPs: 1.13 times", flops(), "gpt2_problem"),
        (
            "figure 2, left",
            "time, forward + backward",
            "41.7 and 7.3 ms: 5.7 times as fast",
            problem(BOTH),
            "gpt2_problem",
        ),
        (
            "figure 1, right",
            "attention of GPT-2",
            "7.6 times as fast",
            "forward: " + problem("forward"),
            "gpt2_problem",
        ),
        (
            "2.1",
            "operators other than products take time, not FLOPs",
            "0.2% of FLOPs, 39% of time (Ivanov et al.)",
            operators(),
            "gpt2_operators",
        ),
        (
            "figure 2, middle",
            "larger blocks move fewer bytes and take less time",
            "to a block of 256",
            blocks(),
            "figure2",
        ),
        ("figure 2, right", "time falls with the share of kept blocks", "N = 4096, a plot", sparsity(), "figure2"),
        (
            "figure 3, left",
            "speed-up over standard attention, N = 128 to 2048",
            "up to 3 times",
            figure3_speed(),
            "figure3",
        ),
        (
            "figure 3, left",
            "Linformer becomes faster",
            "from N = 512 to 1024 on",
            crossover(figure3, "linformer"),
            "figure3",
        ),
        (
            "figure 3, right",
            "memory of standard attention and of Linformer, relative to FlashAttention",
            "up to 20 times, 2 times",
            ", ".join(ratio_at_longest(figure3, x, "bytes") for x in (STANDARD, "linformer")),
            "figure3",
        ),
        (
            "figure 3, right",
            "longest sequence that runs",
            "65536, A100 with 40 GB",
            str(longest(figure3, FLASH)),
            "figure3",
        ),
        ("3.1, B.5", "recomputation costs no time, unlike checkpointing", "–", checkpointing(), "checkpointing"),
        ("theorem 1", "extra memory", "O(N)", memory(), "memory"),
        (
            "table 2",
            "training speed, GPT-2 small",
            "3.5 times Hugging Face, 1.7 times Megatron-LM",
            training("gpt2_small", 1024, 1024),
            "gpt2_small",
        ),
        (
            "table 2",
            "training speed, GPT-2 medium",
            "3.0 times and 1.7 times",
            training("gpt2_medium", 1024, 1024),
            "gpt2_medium",
        ),
        ("figure 4", "the training curves do not change", "the same validation curves", curves(), "gpt2_curves"),
        (
            "table 4",
            "a context of 4096 trains faster than a baseline with 1024",
            "1.3 times Megatron-LM",
            training("gpt2_small", 4096, 1024),
            "gpt2_small",
        ),
        (
            "table 4",
            "perplexity with a context of 1024 and of 4096",
            "18.2 and 17.5 per token",
            context(),
            "gpt2_context",
        ),
        ("table 1", "training speed, BERT-large", "1.15 times NVIDIA's MLPerf 1.1", bert(), "bert"),
        (
            "table 3",
            "training speed, Long Range Arena",
            "2.4 times, block-sparse 2.8 times",
            f"{arena('flash')} times, block-sparse {arena('block-sparse')} times",
            "lra_speed",
        ),
        ("table 3", "accuracy on ListOps", "36.0% standard, 37.6%, 37.0% block-sparse", listops(), "lra_accuracy"),
        ("table 6", "accuracy on Path-X and Path-256", "61.4% and 63.1%", pathfinder(), "pathfinder --side 256"),
    ]
    return table(
        ["in the paper", "claim", "the paper's figure", "ours", "command: `python -m benchmarks.paper …`"],
        ([*cells, f"`{section}`"] for *cells, section in claims),
    )
