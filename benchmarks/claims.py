"""What the two papers claim, in the order of their figures and tables, and what the committed results say of it.

A verdict compares with the paper's figure, not with what this project asked of itself. `judged` says how.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Results = dict[str, dict[str, Any]]  # by benchmark
NEAR = 0.9  # of the paper's figure counts as it
GAIN = 1.1  # times: a smaller ratio is within what identical runs differ by
SAME_R = 0.99  # of a correlation near 1, a tenth would be another claim
BATCH_RIVALS = ("vLLM 0.32, better file", "stock, torch_native, shuffled", "stock, new kernel, shuffled")


class Value(NamedTuple):
    """A ratio of which more is better."""

    name: str
    value: float
    paper: float | None = None  # its figure; None: it names none, only the direction

    @property
    def shown(self) -> str:
        return f"{self.name} {self.value:.3g}"


class Found(NamedTuple):
    """What stands in a row behind a claim."""

    numbers: str
    verdict: str


class Claim(NamedTuple):
    """Something that a paper says."""

    place: str  # figure, table or section
    says: str  # with the paper's figure
    benchmarks: Sequence[str] = ()  # whose results it needs
    here: Callable[[Results], Found] | None = None  # None: not measured
    picture: str = ""


def judged(*values: Value, near: float = NEAR, how: str = "") -> Found:
    """*holds*: each value reaches the paper's figure, or `near` of it; *holds partly*: one does, or goes its way; else *refuted*.

    how: what comes before the verdict, such as "simulated".
    """
    reached = [one.value >= (GAIN if one.paper is None else near * one.paper) for one in values]
    if all(reached):
        verdict = "holds"
    else:
        verdict = "holds partly" if any(reached) or any(one.value >= GAIN for one in values) else "refuted"
    return Found("; ".join(one.shown for one in values), f"{how}: {verdict}" if how else verdict)


def target(results: Results, benchmark: str, name: str) -> float:
    """The value of the target of that name. Raises ValueError where there is none."""
    (found,) = [float(one["value"]) for one in results[benchmark]["targets"] if one["name"] == name]
    return found


def run(results: Results, benchmark: str, part: str, engine: str, column: str, offered: float | None = None) -> float:
    """The median of an engine's turns, or its one turn, at that many requests a second; None: all at once."""
    rows = [*results[benchmark]["parts"][part]["medians"], *results[benchmark]["parts"][part]["rows"]]
    return next(float(row[column]) for row in rows if (row["engine"], row["offered_per_s"]) == (engine, offered))


def memory(results: Results) -> Found:
    curves = {row["engine"]: row["mib"] for row in results["memory_trace"]["rows"]}
    plain, hybrid = (max(curves[name]) - curves[name][0] for name in ("plain", "hybrid"))
    return judged(Value(f"growth during a prefill, plain / hybrid ({plain:.0f} / {hybrid:.0f} MiB)", plain / hybrid))


def calibrated(results: Results) -> Found:
    """Of the tokens that a cache without a limit would save."""

    def share(name: str) -> float:
        rows = results["planner"]["rows"]
        found = [
            row["of_ceiling"] for row in rows if (row["arrivals"], row["load"], row["name"]) == ("single", 2, name)
        ]
        return float(sum(found) / len(found))

    fifo, srjf, ours = map(share, ("fifo", "srjf, lambda 500", "calibrated-srjf, lambda 500"))
    numbers = f"tokens saved of what can be: FIFO {fifo:.0%}, SRJF {srjf:.0%}, calibrated {ours:.0%}"
    return judged(Value("", ours / srjf), how="simulated")._replace(numbers=numbers)


def carried(results: Results) -> Found:
    """Against the policy of stock with the lowest latency."""
    rows = results["load"]["parts"]["wl1"]["capacities"]

    def of(shown: str, rival: str) -> Value:
        (times,) = [row["times"] or 0.0 for row in rows if row["rival"].endswith(rival)]
        return Value(shown, times, 1.4)

    return judged(
        of("load at equal mean, P99, pace: ours / as installed", "torch_native"),
        of("/ PyTorch path", "PyTorch path"),
        of("/ our kernels", "new kernel"),
        of("/ vLLM", "vLLM 0.32"),
    )


def credit(results: Results) -> Found:
    def of(shown: str, rival: str) -> Value:
        return Value(shown, target(results, "load", f"WL2, all at once: requests a second, ours / {rival}"), 1.4)

    return judged(
        of("requests a second at once: ours / as installed", "stock fcfs, torch_native"),
        of("/ our kernels", "stock fcfs, new kernel"),
        of("/ vLLM", "vLLM 0.32"),
    )


def throttled(results: Results) -> Found:
    """Users mixed, at half and at twice what an engine serves at once; a user's requests together at the highest load."""

    def cached(engine: str, load: float) -> float:
        per_s = run(results, "load", "wl1", engine, "requests_per_s")
        return run(results, "load", "wl1", engine, "cached_share", load * per_s)

    names = ("stock fcfs, new kernel", "ours")
    fcfs, ours = ([cached(name, load) for load in (0.5, 2.0)] for name in names)
    loads = {row["offered_per_s"] for row in results["load"]["parts"]["bursts"]["medians"]}
    together = [run(results, "load", "bursts", name, "cached_share", max(loads)) for name in names]
    numbers = (
        f"cached at half and twice what each serves: `fcfs` {fcfs[0]:.0%}, {fcfs[1]:.0%}, ours {ours[0]:.0%},"
        f" {ours[1]:.0%}; a user's requests together: {together[0]:.0%}, {together[1]:.0%}"
    )
    found = judged(Value("", fcfs[0] / fcfs[1]), Value("", ours[1] / fcfs[1]), Value("", together[1] / together[0]))
    return found._replace(numbers=numbers)


def longest(results: Results, *engines: str, model: int = 0) -> float:
    """The longest input of the first engine over the longest of the others'."""
    rows = results["mil"]["rows"]
    name = list(dict.fromkeys(row["model"] for row in rows))[model]
    tokens = {row["engine"]: row["longest_input_tokens"] for row in rows if row["model"] == name}
    return float(tokens[engines[0]] / max(tokens[one] for one in engines[1:] if one in tokens))


SIZES = ("8B / 4:", "70B / 4:")  # the paper's models with a quarter of their widths
CHUNKED, UNCHUNKED = ("stock, chunks of 256", "stock, chunks of 512"), "stock, unchunked"


def fig_10(results: Results) -> Found:
    return judged(*(Value(size, longest(results, "ours", *CHUNKED, model=n), 7.9) for n, size in enumerate(SIZES)))


def table_2(results: Results) -> Found:
    return judged(
        *(
            Value(f"{name} {size}", longest(results, "ours", *rivals, model=model), paper)
            for name, rivals, paper in (("/ chunked", CHUNKED, 5.0), ("/ whole", (UNCHUNKED,), 5.4))
            for model, size in enumerate(SIZES)
        )
    )


def chunked_length(results: Results) -> Found:
    values = [longest(results, CHUNKED[0], UNCHUNKED, model=model) for model in (0, 1)]
    is_less = [one < 2 for one in values]
    verdict = "holds" if all(is_less) else "holds partly" if any(is_less) else "refuted"
    return Found("; ".join(f"{size} {value:.3g}" for size, value in zip(SIZES, values, strict=True)), verdict)


def fairness(results: Results) -> Found:
    """Where a credit improves P99 and worsens the mean, it is a trade."""
    pairs = {
        value: [target(results, "load", f"lambda {value} / lambda 0, 1x: {what}") for what in ("P99", "mean")]
        for value in (500, 2000, 10_000)
    }
    simulated = [
        target(results, "planner", f"simulated, bursts at 4x: {what}, lambda 2000 / lambda 0")
        for what in ("P99", "mean")
    ]
    trades = [p99 < 1 < mean for p99, mean in pairs.values()]
    numbers = "; ".join(f"{value:,}: {p99:.3g}, {mean:.3g}" for value, (p99, mean) in pairs.items())
    verdict = "holds" if all(trades) else "holds partly" if any(trades) else "refuted"
    if simulated[0] < 1 < simulated[1]:
        verdict += "; simulated: holds"
    return Found(
        f"P99, mean, times those of 0: {numbers}; simulated bursts, 2,000: {simulated[0]:.3g}, {simulated[1]:.3g}",
        verdict,
    )


def hybrid(results: Results, name: str) -> float:
    return target(results, "hybrid", name)


def chunk_loss(results: Results) -> Found:
    ratio = hybrid(results, "throughput, chunks of 512 / unchunked")
    verdict = "holds" if ratio <= 0.86 / NEAR else "holds partly" if ratio < 1 / GAIN else "refuted"
    return Found(f"throughput, chunks of 512 / unchunked {ratio:.3g}", verdict)


def shortest_first(results: Results) -> Found:
    """Two policies of one engine, stock with our kernels."""
    fcfs, shortest = ("stock fcfs, new kernel", "stock shortest-prefill-first, new kernel")
    ratios = {
        part: run(results, "load", part, fcfs, "mean_s") / run(results, "load", part, shortest, "mean_s")
        for part in ("wl1", "wl2")
    }
    return judged(
        Value("mean, stock `fcfs` / shortest first: WL1, with the cache,", ratios["wl1"]),
        Value("WL2, nothing shared,", ratios["wl2"]),
    )


def one_a_step(results: Results) -> Found:
    """Of our engine with and without packing."""
    loads = sorted({row["offered_per_s"] for row in results["load"]["parts"]["bursts"]["medians"]})
    short = [run(results, "load", "bursts", engine, "mean_s", loads[1]) for engine in ("ours", "ours, --paper")]
    long = [run(results, "load", "wl2", engine, "requests_per_s") for engine in ("ours", "ours, --paper")]
    values = [
        Value("speed, one a step / packed: WL1 in bursts", short[0] / short[1], 1.0),
        Value("WL2", long[1] / long[0], 1.0),
    ]
    for n in (15, 150):
        packed = target(results, "gpu_hits", f"hits of {n} tokens a second, ours / ours, one a step")
        values.append(Value(f"H200, hits of {n} tokens", 1 / packed, 1.0))
    found = judged(*values)
    return found._replace(verdict="refuted where hits are short") if found.verdict == "holds partly" else found


def correlation(results: Results) -> Found:
    figures = results["jct_model"]["figures"]
    miss, fitted = ([one[name]["pearson_r"] for one in figures.values()] for name in ("cache-miss", "fitted"))
    found = judged(*(Value("", one, 0.987) for one in miss), near=SAME_R)
    shown = [f"{min(one):.3f} and {max(one):.3f}" for one in (miss, fitted)]
    return found._replace(numbers=f"r of cache-miss tokens {shown[0]}, of our fitted model {shown[1]}")


def rows_per_s(results: Results, workload: str, rival: str) -> float:
    return target(results, "batch", f"{workload}: rows a second, job / {rival}")


def stock_at_its_best(results: Results, workload: str) -> float:
    """The job over stock with our kernels, of both orders of the file."""
    return min(rows_per_s(results, workload, f"stock, new kernel, {order}") for order in ("shuffled", "sorted"))


def jobs(results: Results) -> Found:
    """The lengths of Fig. 5, divided by 10: one value of each rival, the lowest."""
    workloads = ("200/20 at 16", "200/100 at 16", "100/100 at 16")
    lowest = [min(rows_per_s(results, one, rival) for one in workloads) for rival in BATCH_RIVALS[:2]]
    same = min(stock_at_its_best(results, one) for one in workloads)
    return judged(
        Value("lowest of three: rows a second, job / vLLM", lowest[0], 1.4),
        Value("/ stock as installed", lowest[1], 1.2),
        Value("/ our kernels", same, 1.2),
    )


def sharing(results: Results) -> Found:
    def of(rival: str) -> list[float]:
        return [rows_per_s(results, f"1600/20 at {degree}", rival) for degree in (2, 16)]

    found = {name: of(rival) for name, rival in zip(("vLLM", "as installed", "our kernels"), BATCH_RIVALS, strict=True)}
    numbers = "; ".join(f"{name} {few:.3g} to {many:.3g}" for name, (few, many) in found.items())
    judgement = judged(*(Value("", many / few) for few, many in found.values()))
    return judgement._replace(numbers=f"1600/20, degree 2 to 16: job / {numbers}")


def saved(results: Results) -> Found:
    """From a shuffled file, as the paper's rivals get it; of stock's policies the best."""

    def best(engine: str) -> float:
        rows = results["batch"]["parts"]["whole"]["medians"]
        found = [row for row in rows if (row["workload"], row["file"]) == ("200/20 at 16", "shuffled")]
        return max(float(row["cached_share"]) for row in found if row["engine"].startswith(engine))

    ours, vllm, stock = best("ours"), best("vLLM"), best("stock")
    found = judged(Value("", ours / vllm, 0.852 / 0.401))
    return found._replace(numbers=f"200/20 at 16: ours {ours:.1%}, vLLM {vllm:.1%}, stock {stock:.1%}")


def industry(results: Results) -> Found:
    return judged(
        Value("rows a second, job / vLLM at its best", rows_per_s(results, "industry", BATCH_RIVALS[0]), 1.26),
        Value("/ stock with our kernels at its best", stock_at_its_best(results, "industry"), 1.26),
    )


def step_sizes(results: Results) -> Found:
    """The paper's ablation has the same engine on both sides; here steps are only counted."""
    steps = results["batch"]["parts"]["decode"]["step_tokens"]
    found = {name: len(sizes) for name, sizes in steps.items() if "100 new tokens" in name and sizes}
    ours = next(n for name, n in found.items() if name.startswith("ours"))
    stock = [n for name, n in found.items() if name.startswith("stock")]
    return Found(
        f"steps of one job: ours {ours}, stock {min(stock)} to {max(stock)}; off and on not measured", "not measured"
    )


def attention(results: Results) -> Found:
    ratios = [
        float(one["value"]) for one in results["batch"]["targets"] if "shared attention / each alone" in one["name"]
    ]
    return Found(
        f"whole jobs on a CPU, on / off {min(ratios):.3g} to {max(ratios):.3g}; kernels of GPUs", "not measured"
    )


def one_level(results: Results) -> Found:
    lost = target(results, "batch", "industry workload: share of tokens that one level saves less than all levels")
    return Found(f"tokens saved less {lost:.2%}", "holds" if lost <= 0.01 / NEAR else "refuted")


def planning(results: Results) -> Found:
    seconds = target(results, "batch", "planning 8000 rows of the industry workload, s")
    return Found(f"8,000 rows {seconds:.2g} s", "holds" if seconds <= 1.51 / NEAR else "refuted")


def sorted_file(results: Results) -> Found:
    ratio = rows_per_s(results, "200/20 at 16", BATCH_RIVALS[0])
    return judged(Value("200/20 at 16, rows a second, job / vLLM with the better file", ratio, 1.38))


PREFILL_ONLY = (
    Claim("Fig. 3", "hybrid prefilling takes the spikes out of memory", ("memory_trace",), memory, picture="memory"),
    Claim("Fig. 5", "calibration keeps the hit rate of a small cache", ("planner",), calibrated),
    Claim("Figs. 6, 7, WL1", "1.4 to 4.0 times the load at equal mean and P99", ("load",), carried, "latency"),
    Claim("Figs. 6, 7, WL2", "the same for long requests that share nothing", ("load",), credit, "long_latency"),
    Claim("Fig. 8", "2 cards: more throughput than tensor and pipeline parallel, also with NVLink"),
    Claim("Fig. 9", "first come, first served loses the prefix cache under load", ("load",), throttled, "throughput"),
    Claim("Fig. 10", "all techniques: 7.9 (its text: 8.7) times chunked prefill", ("mil",), fig_10, "mil"),
    Claim("Fig. 11", "a higher lambda: better P99, worse mean", ("load", "planner"), fairness, "cdf"),
    Claim("Table 2", "up to 5 times chunked prefill, 5.4 to 7.9 times whole prompts", ("mil",), table_2),
    Claim("Table 2", "chunked prefill: less than twice that of whole prompts", ("mil",), chunked_length),
    Claim("§2.5", "chunks of 512 cost 14 % of throughput", ("hybrid",), chunk_loss),
    Claim(
        "§2.6",
        "dropping KV alone: 1.6 times the input",
        ("mil",),
        lambda results: judged(
            Value(
                "KV evicted / kept, on servers that differ by 30 to 70 %:",
                longest(results, "ours, eviction only", "ours, neither"),
                1.6,
            )
        ),
    ),
    Claim(
        "§4",
        "hybrid prefilling costs no throughput",
        ("hybrid",),
        lambda results: judged(
            *(
                Value(f"hybrid / {one}", hybrid(results, f"throughput, hybrid / {one}"), 1.0)
                for one in ("unchunked", "chunks of 512", "chunks of 2048")
            )
        ),
    ),
    Claim(
        "§4.3",
        "outputs allocated before and written in place: longer inputs",
        ("hybrid",),
        lambda results: judged(
            *(
                Value(f"with / without {what}", hybrid(results, f"longest input in 1 GiB, hybrid / {name}"))
                for what, name in (("the first", "not-preallocated"), ("the second", "not-in-place"))
            ),
            how="forecast",
        ),
    ),
    Claim("§6", "shortest job first lowers the mean", ("load",), shortest_first),
    Claim("§6.1", "one request a step loses nothing", ("load", "gpu_hits"), one_a_step),
    Claim("§6.3", "time follows cache-miss tokens, r 0.987", ("jct_model",), correlation, "jct"),
)
BATCH_LLM = (
    Claim("Figs. 2, 9, Table 2", "steps of equal size: 1.03 to 1.04 times", ("batch",), step_sizes, "steps"),
    Claim("Fig. 5", "1.4 to 4.1 times vLLM, 1.2 to 2.8 times SGLang", ("batch",), jobs),
    Claim("Fig. 6", "grows with the sharing degree, to 10.8 times", ("batch",), sharing),
    Claim("Fig. 8", "saves 85.2 % of 2000/200 at 16, vLLM 40.1 %", ("batch",), saved),
    Claim("Fig. 10", "kernels of shared prefixes", ("batch",), attention),
    Claim("Table 1", "industry workload: 1.26 to 1.30 times vLLM at its best", ("batch",), industry),
    Claim("§4.2", "one level of prefixes saves 1 % less than all", ("batch",), one_level),
    Claim("§6.2.1", "1.38 times vLLM with a sorted file", ("batch",), sorted_file),
    Claim("§6.3.4", "planning 8,000 rows takes 1.51 s of 920", ("batch",), planning),
)
