"""Break one line at a time, and see that a test fails.

A test is useless if it passes when the code that it tests is broken. Each mutation is
made in a copy of the repository, where the tests named with it run on two ranks.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

# A broken collective may leave the ranks waiting: that is a failure too.
SECONDS = 240


@dataclass(frozen=True)
class Mutation:
    """A line of the package, and a wrong one that replaces it.

    Args:
        part: The part of the package that is broken.
        file: The file of the package.
        line: Text that occurs exactly once in the file.
        broken: Text that replaces it.
        tests: The test file, and the expression (`-k`) that selects tests in it.
    """

    part: str
    file: str
    line: str
    broken: str
    tests: tuple[str, str]


MUTATIONS = [
    Mutation(
        "steps: an update is counted only where there is a batch",
        "training/step.py",
        "return tf.control_dependencies(leaves)",
        "return contextlib.nullcontext()",
        ("test_streams.py", "counted_once"),
    ),
    Mutation(
        "replicas: the optimizer's state is compared",
        "callbacks/replica_check.py",
        "variables = [*numbers, *model.trainable_weights, *state]",
        "variables = list(model.trainable_weights)",
        ("test_replica_check.py", "once_for_each"),
    ),
    Mutation(
        "stop: a request is sent with the gradients",
        "optimizer/step_context.py",
        "self._agreed.assign_add(tf.cast(total, self._agreed.dtype))",
        "pass",
        ("test_every_callback.py", "stop_request_at"),
    ),
    Mutation(
        "callbacks: one that may read a file waits for one that writes",
        "callbacks/user_callbacks.py",
        "phases.append([])",
        "pass",
        ("test_user_callbacks.py", "different"),
    ),
    Mutation(
        "files: replaced as a whole",
        "training/saving.py",
        "made = os.path.join(draft, name)",
        "made = target",
        ("test_user_callbacks.py", "full_disk"),
    ),
    Mutation(
        "every optimizer: gradients are averaged",
        "optimizer/attach.py",
        "averaged = reduce_gradients(self, grads, trainable_variables, is_sum=is_sum)",
        "pass",
        ("test_cases.py", "Nadam"),
    ),
    Mutation(
        "accumulation: one allreduce for each update",
        "optimizer/reduce.py",
        "average = _accumulate if accumulates(optimizer) else _average",
        "average = _average",
        ("test_wire.py", "one_collective"),
    ),
    Mutation(
        "accumulation: an update resets the accumulators",
        "optimizer/accumulation.py",
        "accumulator.assign(tf.zeros_like(accumulator.value))",
        "pass",
        ("test_cases.py", "accumulation and 101"),
    ),
    Mutation(
        "accumulation: an epoch ends with the sums of one process",
        "optimizer/accumulation.py",
        "kept = summed if comm.rank() == 0 else tf.zeros_like(summed)",
        "kept = summed",
        ("test_cases.py", "accumulation and 101"),
    ),
    Mutation(
        "data: weighted by rows",
        "optimizer/reduce.py",
        "weight = 1 if context.rows is None else context.rows",
        "weight = 1",
        ("test_streams.py", "every_kind"),
    ),
    Mutation(
        "data: one permutation for all ranks",
        "data/arrays.py",
        "stateless_shuffle(rows, [self.seed, number])",
        "stateless_shuffle(rows, [self.seed + 1, number])",
        ("test_cases.py", "shuffled"),
    ),
    Mutation(
        "mixed precision: averaged before the check for inf",
        "optimizer/attach.py",
        "    for part in inside:\n        mixin.remove",
        "    for part in []:\n        mixin.remove",
        ("test_equivalence.py", "mixed_precision"),
    ),
    Mutation(
        "XLA: averaging between the two compiled functions",
        "training/recorded_step.py",
        "own = [with_shape(*pair) for pair in zip(own, variables, strict=True)]\n"
        "        averaged = reduce_gradients(\n"
        "            call.optimizer, own, call.variables, is_sum=call.is_sum\n"
        "        )",
        "averaged = [with_shape(*pair) for pair in zip(own, variables, strict=True)]",
        ("test_equivalence.py", "sgd-True"),
    ),
    Mutation(
        "embeddings: repeated rows are merged",
        "optimizer/reduce.py",
        "sparse.merge(own)",
        "own",
        ("test_wire.py", "merged"),
    ),
    Mutation(
        "embeddings: repeated rows reach the optimizer one by one",
        "optimizer/sparse.py",
        "    return leaf.__class__ in linear and not is_clipped",
        "    return True",
        ("test_sparse.py", "gets_the_slices"),
    ),
    Mutation(
        "embeddings: clipping is by each slice",
        "optimizer/sparse.py",
        "leaf.__class__ in linear and not is_clipped",
        "leaf.__class__ in linear",
        ("test_sparse.py", "gets_the_slices"),
    ),
    Mutation(
        "embeddings: repeated rows are added in one order",
        "optimizer/sparse.py",
        "tf.convert_to_tensor(value) if is_rows else value",
        "value",
        ("test_sparse.py", "added_up_before"),
    ),
    Mutation(
        "embeddings: an inf of any slice",
        "optimizer/reduce.py",
        "map_values(sparse.all_or_none_finite, reduced)",
        "reduced",
        ("test_sparse.py", "loss_scale"),
    ),
    Mutation(
        "embeddings: positions are added up over the ranks",
        "optimizer/sparse.py",
        "lookup if is_of_rows else -1 - lookup",
        "lookup",
        ("test_sparse.py", "Positions"),
    ),
    Mutation(
        "embeddings: positions are added up by their repetitions",
        "optimizer/sparse.py",
        "indices - repetition * count",
        "indices",
        ("test_sparse.py", "Positions"),
    ),
    Mutation(
        "embeddings: the rows of every rank",
        "optimizer/sparse.py",
        "for rank in range(comm.size()):",
        "for rank in range(1):",
        ("test_cases.py", "rows"),
    ),
    Mutation(
        "training: a gradient on one rank only is an error",
        "optimizer/reduce.py",
        "_check_same_gradients(optimizer, gradients, known, number)",
        "pass",
        ("test_bad_input.py", "one_rank_only"),
    ),
    Mutation(
        "training: names of collectives without scopes",
        "comm/transport.py",
        '"ignore_name_scope": True}',
        '"ignore_name_scope": False}',
        ("test_batch_norm.py", "equal_one_process"),
    ),
    Mutation(
        "statistics: of the global batch",
        "training/batch_norm.py",
        "if comm.size() == 1:",
        "if True:",
        ("test_batch_norm.py", "equal_one_process"),
    ),
    Mutation(
        "statistics: averaged by rows",
        "callbacks/average_statistics.py",
        "    rows = tf.cast(rows, tf.float64)",
        "    rows = tf.constant(1.0, tf.float64)",
        ("test_batch_norm.py", "weighted_by_rows"),
    ),
    Mutation(
        "state: counters are summed",
        "callbacks/average_statistics.py",
        "added = comm.sum(comm.to_array(variable) - start)",
        "added = comm.to_array(variable) - start",
        ("test_aggregation.py", "rule"),
    ),
    Mutation(
        "losses: masks",
        "training/losses.py",
        'part = tf.math.divide_no_nan(own, context.total(own, purpose="divisors"))',
        "part = context.row_fraction(tf.float64)",
        ("test_cases.py", "padded"),
    ),
    Mutation(
        "losses: a compute_loss that is neither is gathered",
        "training/losses.py",
        "    if is_gathered:",
        "    if False:",
        ("test_sums.py", "weights_sum"),
    ),
    Mutation(
        "losses: sums in a step of the user's own",
        "training/trial.py",
        'return "sum" if of_sum <= tolerance else "neither"',
        'return "neither"',
        ("test_sums.py", "own_sum"),
    ),
    Mutation(
        "losses: steps that are random",
        "training/trial.py",
        'return "sum" if after > least * before else "mean"',
        'return "mean"',
        ("test_trial.py", "noisy_sum"),
    ),
    Mutation(
        "options: float16 has a scale",
        "comm/compressed.py",
        'if kind == "fp16" else',
        "if False else",
        ("test_wire.py", "overflows"),
    ),
    Mutation(
        "metrics: summed over the ranks",
        "training/metrics.py",
        "if comm.size() == 1:",
        "if True:",
        ("test_metrics.py", "own_rule"),
    ),
    Mutation(
        "metrics: a rank without rows does not count",
        "training/metrics.py",
        "counted = [report for report in reports if report.seen.has_rows]",
        "counted = reports",
        ("test_metrics.py", "every_metric"),
    ),
    Mutation(
        "metrics: values of the last step by the rows of its batch",
        "training/metrics.py",
        "counts.has_rows and counts.steps == last",
        "counts.has_rows",
        ("test_metrics.py", "without_a_metric"),
    ),
    Mutation(
        "start: all ranks begin with the first rank's weights",
        "callbacks/broadcast_variables.py",
        "comm.broadcast_variables(variables, self.root_rank)",
        "pass",
        ("test_equivalence.py", "initial_weight"),
    ),
    Mutation(
        "stop: all ranks after the same step",
        "callbacks/stop_together.py",
        "if comm.size() == 1:",
        "if True:",
        ("test_callbacks.py", "stop_request_of_one_rank"),
    ),
    Mutation(
        "batches: sharded round robin",
        "data/dealer.py",
        "batch = batches.skip(index).take(1)",
        "batch = batches.take(1)",
        ("test_streams.py", "every_kind"),
    ),
    Mutation(
        "divided data: each rank has its own rows",
        "data/presharded.py",
        "dataset = source.shard(size, rank)",
        "dataset = source.shard(size, 0)",
        ("test_shard.py", "trains_as_one"),
    ),
    Mutation(
        "divided data: what is before `shard` is compared",
        "setup/sources.py",
        "comm.agree(facts, advice=_PRESHARDED_ADVICE)",
        "pass",
        ("test_shard.py", "cannot_be_divided"),
    ),
    Mutation(
        "batches: all ranks end after the same step",
        "data/stream.py",
        "if _MORE not in states and _EMPTY not in states:",
        "if state != _MORE:",
        ("test_streams.py", "run_dry"),
    ),
    Mutation(
        "batches: compared before they are sharded",
        "setup/sources.py",
        "if any(other != fingerprints[0] for other in fingerprints):",
        "if False:",
        ("test_streams.py", "plan"),
    ),
    Mutation(
        "resume: statistics of each rank",
        "checkpoint/states.py",
        "variables[int(index)].assign(value)",
        "pass",
        ("test_resume.py", "was_ended"),
    ),
    Mutation(
        "resume: dropout masks of each rank",
        "checkpoint/states.py",
        'for variable, value in zip(seed_states(model), own["seeds"], strict=True):',
        "for variable, value in ():",
        ("test_resume.py", "was_ended"),
    ),
    Mutation(
        "resume: metrics of the epoch so far",
        "checkpoint/saver.py",
        "states.restore_metrics(self.model, saved.ranks)",
        "pass",
        ("test_resume.py", "was_ended"),
    ),
    Mutation(
        "resume: state of callbacks",
        "checkpoint/states.py",
        "setattr(callback, name, value)",
        "pass",
        ("test_resume.py", "was_ended"),
    ),
    Mutation(
        "resume: the optimizer's state",
        "callbacks/broadcast_variables.py",
        "variables += outer.variables",
        "pass",
        ("test_resume.py", "was_ended"),
    ),
    Mutation(
        "resume: from the next row",
        "data/division.py",
        "is_first * (self.begin - missing * global_size)",
        "is_first * (0 - missing * global_size)",
        ("test_resume.py", "was_ended"),
    ),
    Mutation(
        "data: reading first batches keeps a cache complete",
        "data/source.py",
        "return list(dataset.take(count))",
        "return list(itertools.islice(dataset, count))",
        ("../data/test_looks.py", "windows"),
    ),
    Mutation(
        "data: a pass that ends too early is an error",
        "data/pipeline.py",
        "return dataset.apply(tf.data.experimental.assert_cardinality(length))",
        "return dataset",
        ("test_bad_input.py", "cut_short"),
    ),
    Mutation(
        "resume: from the next batch",
        "data/adapters.py",
        "dealer.deal(data.skip(division.begin)",
        "dealer.deal(data.take(length - division.begin)",
        ("test_resume.py", "in_batches"),
    ),
]


def notice(mutation: Mutation) -> str:
    """The result of the tests: "failed", "hung", or "" if they pass."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("keras_dist", "tests"):
            shutil.copytree(ROOT / name, copy / name)
        shutil.copy(ROOT / "pyproject.toml", copy)
        path = copy / "keras_dist" / mutation.file
        text = path.read_text()
        if text.count(mutation.line) != 1:
            sys.exit(f"Not once in {mutation.file}: {mutation.line}")
        path.write_text(text.replace(mutation.line, mutation.broken))
        file, words = mutation.tests
        run = [sys.executable, "-m", "keras_dist", "run", "-np", "2"]
        tests = ["-m", "pytest", "-x", "-q", f"tests/ranks/{file}", "-k", words]
        process = subprocess.Popen(
            [*run, *tests],
            cwd=copy,
            env={
                **os.environ,
                "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "70",
                "LONG_TESTS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()  # the launcher ends its ranks
            process.communicate()
            return "hung"
        # Not the exit code: pytest also fails if it selects no test.
        is_noticed = " failed" in output or "has been shut down" in output
        if "no rank has made progress" in output:
            return "hung"
        return "failed" if is_noticed else ""


def main(words: list[str]) -> int:
    """Try mutations whose part contains one of `words`, or all; return an exit code."""
    chosen = [m for m in MUTATIONS if not words or any(w in m.part for w in words)]
    missed = []
    for mutation in chosen:
        how = notice(mutation)
        print(f"{how or 'MISSED':<6}  {mutation.part}", flush=True)
        missed += [] if how else [mutation]
    print(f"{len(chosen) - len(missed)} of {len(chosen)} mutations noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
