"""Arguments from environment variables, for benchmarks/{levers,sharded}.py."""

import os


def compiled() -> dict:
    """Arguments of `compile`."""
    steps = os.environ.get("BENCH_STEPS")
    return {"steps_per_execution": int(steps)} if steps else {}


def fitted() -> dict:
    """Arguments of `dist_fit`."""
    found = {}
    if os.environ.get("BENCH_COMPRESSION"):
        found["compression"] = os.environ["BENCH_COMPRESSION"]
    if os.environ.get("BENCH_TIMELINE"):
        found["timeline"] = os.environ["BENCH_TIMELINE"]
    if os.environ.get("BENCH_SHARDED"):
        found["shard_optimizer"] = True
    return found
