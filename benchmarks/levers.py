"""What each setting does to the training speed, on two ranks.

    python benchmarks/levers.py
    python benchmarks/levers.py --levers default "fusion off" --models cnn

Every setting has its turn in each round. The share is that of the ceiling, which the
same processes train in turn, under the same setting; rows per second are those of
`dist_fit`.
"""

import argparse
import statistics
from collections import defaultdict

import compare
import report

# Variables of the environment under which keras_dist is measured.
LEVERS = {
    "default": {},
    "Horovod's cycle of 0.5 ms": {"HOROVOD_CYCLE_TIME": "0.5"},
    "Horovod's cycle of 1 ms": {"HOROVOD_CYCLE_TIME": "1"},
    "Horovod's cycle of 2.5 ms": {"HOROVOD_CYCLE_TIME": "2.5"},
    "Horovod's cycle of 5 ms": {"HOROVOD_CYCLE_TIME": "5"},
    "each rank on its own cores": {"BENCH_BIND": "1"},
    "fusion off": {"HOROVOD_FUSION_THRESHOLD": "0"},
    "cache off": {"HOROVOD_CACHE_CAPACITY": "0"},
}


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--levers", nargs="+", default=list(LEVERS), choices=LEVERS)
    parser.add_argument("--models", nargs="+", default=list(report.MODELS))
    parser.add_argument("--scale", type=float, default=1, help="of the steps")
    arguments = parser.parse_args()
    options = ["--scale", str(arguments.scale), "--models", *arguments.models]
    rates = defaultdict(list)
    for number in range(arguments.rounds):
        turn = number % len(arguments.levers)
        for lever in arguments.levers[turn:] + arguments.levers[:turn]:
            told = compare.run(compare.TABLE["keras_dist"], options, LEVERS[lever])
            for model in arguments.models:
                ours, ceiling = (
                    compare.rate_of(told[part, model]) for part in ("own", "twin")
                )
                rates[model, lever].append((ours, ours / ceiling))
                print(
                    f"{lever}, {model}: {ours:,.0f}, {ours / ceiling:.3f}", flush=True
                )
    print("| model | setting | share of the ceiling | rows per second |")
    print("|---|---|---|---|")
    for model in arguments.models:
        for lever in arguments.levers:
            ours, shares = zip(*rates[model, lever], strict=True)
            share = report.spread(shares)
            name = report.MODELS[model].split(",")[0]
            print(
                f"| {name} | {lever} | {share.median:.2f} "
                f"({share.low:.2f} to {share.high:.2f}) | "
                f"{statistics.median(ours):,.0f} |"
            )


if __name__ == "__main__":
    main()
