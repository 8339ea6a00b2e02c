"""What a machine with GPUs does: one rank for each GPU, or two ranks without one.

    make gpu

Runs `keras-dist check`, and a small training in each precision; writes docs/gpu.md, and
all results to .bench/gpu.json. Please send both in: .github/ISSUE_TEMPLATE/gpu.yml.
"""

import datetime
import json
import os
import re
import subprocess
import sys
from importlib import metadata

from start import ROOT, keras_dist_run, read_measured

from keras_dist.launch.hosts import num_gpus

PAGE, RESULTS = ROOT / "docs" / "gpu.md", ROOT / ".bench" / "gpu.json"
SECONDS = 900  # of one command
VARIANTS = ("float32", "xla", "mixed_float16", "mixed_bfloat16")

_COLUMNS = (
    "training",
    "ranks",
    "transport",
    "difference",
    "rows per second",
    "share of the ceiling",
    "MiB of a rank",
)

_SHOWN = "^  . (?:GPUs|connect|devices|training) .*"

_PAGE = """# One machine, each of its GPUs

Written by `make gpu` on {date}, at commit {commit}; do not edit. **{device}**.
{software}. Driver: {driver}. NCCL: {nccl}. Load average before: {load:.1f}. To send in
the page of your machine, open an issue "Results of GPUs".

{table}

A small convolutional network trains. "Difference" is the largest one of a weight to
plain Keras on one process with the same global batch, relative to the largest number of
its tensor. The ceiling is the same processes without averaging. `keras-dist check`:

```text
{checks}
```
"""


def run(command):
    """Run a command from the root; return what it printed, whether it passed or not."""
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired as error:
        return f"{(error.stdout or b'').decode()}\nno end within {SECONDS} s"
    return done.stdout if done.returncode == 0 else done.stdout + done.stderr


def nvidia_driver():
    """Version of NVIDIA's driver; "none" without one."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return run(query).split()[0]
    except (OSError, IndexError):
        return "none"


def main():
    """Measure, and write both files."""
    load = os.getloadavg()[0]
    RESULTS.parent.mkdir(exist_ok=True)
    ranks = num_gpus() or 2
    checks = run([sys.executable, "-m", "keras_dist", "check", "-np", str(ranks)])
    print(checks, flush=True)
    script, rows, results = "benchmarks/stacks/gpu_rank.py", [], {"check": checks}
    device, nccl = "no GPU", ""
    for variant in VARIANTS:
        printed = run([*keras_dist_run(ranks), script, variant])
        found = results[variant] = read_measured(printed)
        if len(found) != ranks:  # it is a result, too
            results[variant] = printed
            lines = printed.strip().splitlines() or ["no output"]
            rows.append(f"| {variant} | {ranks} | failed: {lines[-1][:200]} ||||")
            continue
        one = found[0]
        device = ", ".join(dict.fromkeys(each["device"] for each in found))
        nccl = nccl or one["nccl"]
        numbers = (
            f"{max(each['difference'] for each in found):.1e}",
            f"{one['rows_per_second']:,.0f}",
            f"{one['share']:.2f}",
            f"{max(each['memory'] for each in found):,.0f}",
        )
        rows.append(
            f"| {variant} | {ranks} | {one['transport']} | {' | '.join(numbers)} |"
        )
        print(rows[-1], flush=True)
    commit = run(["git", "rev-parse", "--short", "HEAD"]).strip()
    software = [f"{name} {metadata.version(name)}" for name in ("tensorflow", "keras")]
    PAGE.write_text(
        _PAGE.format(
            date=f"{datetime.date.today():%Y-%m-%d}",
            commit=commit,
            device=f"{ranks} × {device}"
            if device != "no GPU"
            else "no GPU, 2 ranks on CPUs",
            software=", ".join(software),
            driver=nvidia_driver(),
            load=load,
            nccl=nccl or "not loaded",
            table="\n".join([f"| {' | '.join(_COLUMNS)} |", "|---" * 7 + "|", *rows]),
            # Without the names and addresses of the machine.
            checks="\n".join(re.findall(_SHOWN, checks, re.MULTILINE)),
        )
    )
    RESULTS.write_text(json.dumps(results, indent=1))
    print(f"written: {PAGE.relative_to(ROOT)}, {RESULTS.relative_to(ROOT)}")


if __name__ == "__main__":
    sys.exit(main())
