"""What `shard_optimizer` costs and saves on two ranks, beside one plain process.

    make sharded

All train with the same global batch of 256 rows, one after the other, in another order
each round. Over MPI, too, if Open MPI is installed (Debian: libopenmpi-dev). Writes
docs/sharded.md. The cores must be idle.
"""

import argparse
import os
from collections import defaultdict
from dataclasses import replace

import compare
import report

ONE, WHOLE, DIVIDED = "one process", "two ranks", "`shard_optimizer=True`"
APART = "two processes, not averaged"
TRANSPORTS = ["Gloo", *(["MPI"] if compare.HAS_MPI else [])]
SHARED = compare.SAME_BATCH[report.SHARED]

# Optimizer, the models that are trained with it, and the goal of the MLP: its rows per
# second beside one process.
CASES = {"momentum": (["mlp", "cnn"], 1.00), "adam": (["mlp"], 1.05)}
NAMES = {"momentum": "SGD with momentum", "adam": "Adam"}
CNN_GOAL = 0.99  # beside two ranks without it
STATE_GOAL = 0.1  # of a rank's part
MEMORY_GOAL = 16  # MiB beside the gradients and a part of the state

# With it malloc gives back all memory of 1 MiB and more that is freed.
AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}

_WORDS = """# The optimizer's state, divided

Written by `make sharded`; do not edit. What [`shard_optimizer=True`](how_to/memory.md)
costs and saves: two ranks on {cores} cores ({machine}, no GPU), 256 rows a step for all
together by `batch="global"`: medians of {rounds} rounds (smallest to largest), in which
all took turns. "One process" is plain `model.fit` with all cores. Of two processes that
are not averaged each trains its 128 rows a step by plain `model.fit`, beside the other:
what two ranks could do if averaging cost nothing, and each made the whole update. Half
of the rows take a core more than half of the time, so that may be less than one process
trains ([decisions](decisions.md)). The small CNN is too small to be divided: it trains
the same graph with `shard_optimizer`, and what differs is noise. Ratios are taken
within each round, and are medians too.

| model, optimizer | | rows per second | ÷ one process | ÷ two ranks without it |
|---|---|---|---|---|
{speeds}

Peak memory of a rank that trains the MLP with Adam, more than plain `model.fit` of its
rows by `SGD` without a state (which has weights and gradients): MiB, in as many
launches. In the second line `malloc` gives back at once what is freed; what it keeps
for later is more than what is measured here.

| | two ranks | `shard_optimizer=True` |
|---|---|---|
{memory}

| goal | measured | |
|---|---|---|
{goals}
"""


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    compare.make_mpi()
    rates, states = speeds(arguments.rounds)
    memory = {
        words: measured_memory(arguments.rounds, variables)
        for words, variables in {"as usual": {}, "given back": AT_ONCE}.items()
    }
    write(rates, states, memory, arguments.rounds)
    print("written: docs/sharded.md")


def stacks() -> dict[tuple[str, str], tuple[compare.Stack, dict[str, str]]]:
    """What is started, and with which variables, by its name and its transport."""
    apart = compare.Stack("keras3.py", "alone", "horovodrun")
    found = {(ONE, ""): (compare.SAME_BATCH[ONE], {}), (APART, ""): (apart, {})}
    for transport in TRANSPORTS:
        stack = SHARED
        if transport == "MPI":
            stack = replace(SHARED, environment="mpi", flags=("--mpi",))
        found[WHOLE, transport] = stack, {}
        found[DIVIDED, transport] = stack, {"BENCH_SHARDED": "1"}
    return found


def speeds(rounds: int) -> tuple[dict, dict]:
    """Rows per second, and numbers in the state of a rank.

    Returns:
        Optimizer and model → stack → rows per second in each round, and the same for
        the largest number of a rank.
    """
    rates: dict = defaultdict(lambda: defaultdict(list))
    states: dict = defaultdict(dict)
    for number in range(rounds):
        names = list(stacks())
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            stack, variables = stacks()[name]
            for optimizer, (models, _) in CASES.items():
                options = ["--optimizer", optimizer, "--models", *models]
                for (_, model), ranks in compare.run(stack, options, variables).items():
                    rate = compare.rate_of(ranks)
                    rates[optimizer, model][name].append(rate)
                    if name[0] != APART:  # which does not count them
                        states[optimizer, model][name] = max(o["state"] for o in ranks)
                    print(
                        number + 1, optimizer, model, *name, f"{rate:,.0f}", flush=True
                    )
    return rates, states


def measured_memory(rounds: int, variables: dict[str, str]) -> dict[str, list[float]]:
    """MiB that a rank with Adam needs more than a plain process without a state."""
    plain = compare.Stack("keras3.py", "alone", "horovodrun")
    ours = replace(plain, method="keras_dist")
    more: dict = defaultdict(list)
    for _ in range(rounds):
        peaks = {}
        for name, stack, optimizer, own in (
            ("plain", plain, "sgd", {}),
            (WHOLE, ours, "adam", {}),
            (DIVIDED, ours, "adam", {"BENCH_SHARDED": "1"}),
        ):
            options = [*compare.COSTS_OPTIONS, "--optimizer", optimizer]
            ranks = compare.run(stack, options, variables | own)["own", "mlp"]
            peaks[name] = max(rank["memory"] for rank in ranks) / 2**20
        print({name: round(peak) for name, peak in peaks.items()}, flush=True)
        for name in (WHOLE, DIVIDED):
            more[name].append(peaks[name] - peaks["plain"])
    return more


def write(rates: dict, states: dict, memory: dict, rounds: int) -> None:
    """Write docs/sharded.md."""
    lines, goals = [], []
    for (optimizer, model), found in rates.items():
        title = f"{report.MODELS[model].split(',')[0]}, {NAMES[optimizer]}"
        for (name, transport), values in found.items():
            own = report.spread(values)
            cells = [title, name + (f", {transport}" if transport else "")]
            cells.append(f"{own.median:,.0f} ({own.low:,.0f} to {own.high:,.0f})")
            ratios = [report.ratio(found, (name, transport), (ONE, ""))]
            if name == DIVIDED:
                ratios.append(
                    report.ratio(found, (name, transport), (WHOLE, transport))
                )
            shown = [f"{r.median:.2f} ({r.low:.2f} to {r.high:.2f})" for r in ratios]
            cells += [*shown, ""] if len(shown) == 1 else shown
            lines.append(f"| {' | '.join(cells)} |")
            if name != DIVIDED:
                continue
            is_mlp = model == "mlp"
            goal = CASES[optimizer][1] if is_mlp else CNN_GOAL
            words = "one process" if is_mlp else "two ranks without it"
            measured = ratios[0 if is_mlp else 1].median
            text = f"{title}, {transport}: at least {goal:.2f} × {words}"
            goals.append((text, f"{measured:.2f}", measured >= goal))
    whole = states["adam", "mlp"][WHOLE, "Gloo"]
    part = states["adam", "mlp"][DIVIDED, "Gloo"] / whole
    is_met = abs(part * compare.RANKS - 1) <= STATE_GOAL
    text = (
        f"Adam's state on a rank: 1 / {compare.RANKS} ± {STATE_GOAL:.0%} of the whole"
    )
    goals.append((text, f"{part:.3f}", is_met))
    limit = whole * 4 / 2**20 / compare.RANKS + MEMORY_GOAL
    of_memory = []
    for words, more in memory.items():
        spreads = [report.spread(more[name]) for name in (WHOLE, DIVIDED)]
        shown = [f"{s.median:.0f} ({s.low:.0f} to {s.high:.0f})" for s in spreads]
        of_memory.append(f"| {' | '.join([words, *shown])} |")
        text = f"memory, {words}: at most {limit:.0f} MiB more"
        measured = spreads[1].median
        goals.append((text, f"{measured:.0f} MiB", measured <= limit))
    text = _WORDS.format(
        cores=len(os.sched_getaffinity(0)),
        machine=os.uname().machine,
        rounds=rounds,
        speeds="\n".join(lines),
        memory="\n".join(of_memory),
        goals="\n".join(
            f"| {goal} | {measured} | {'met' if is_met else 'NOT met'} |"
            for goal, measured, is_met in goals
        ),
    )
    (report.DOCS / "sharded.md").write_text(text)


if __name__ == "__main__":
    main()
