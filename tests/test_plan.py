"""The plan box: every decision, printed before training."""

import dataclasses

from keras_dist import plan

PLAN = plan.Plan(
    version="1.2.3",
    size=4,
    hosts=2,
    device="CPU, 1 thread each",
    transport="Gloo",
    training=plan.Rows(
        "arrays, sharded by row, shuffled",
        64,
        60001,
        True,
        938,
        235,
        "steps scaled: divide",
    ),
    validation=plan.Rows("arrays, sharded by row", 64, 10000, True, 157, 40),
    rates=(plan.Rate("0.4", "0.1 → 0.4 (linear: × 4)"),),
    is_compiled=False,
    outputs=("CSVLogger",),
)


def test_the_box_says_everything():
    """Ranks, transport, batches, rows, steps, rates, outputs; before and after."""
    box = str(PLAN)
    for text in (
        "keras_dist 1.2.3",
        "4 on 2 hosts, CPU, 1 thread each",
        "64 rows per rank, 256 global",
        "60,001 → 15,000 or 15,001 per rank",
        "938 → 235 an epoch (steps scaled: divide)",
        "arrays, sharded by row, shuffled",
        "arrays, sharded by row: 10,000 → 2,500, 157 → 40 steps",
        "0.1 → 0.4 (linear: × 4)",
        "runs CSVLogger",
    ):
        assert text in box


def test_every_line_of_the_box_is_as_wide():
    """Also with a name that is longer than the box, of which nothing is lost."""
    name = "Very" * 40 + "LongName"
    long = dataclasses.replace(PLAN, outputs=(name,))
    lines = str(long).splitlines()
    assert {len(line) for line in lines} == {76}
    assert name in "".join(line[2:-2].strip() for line in lines)


def test_the_plan_of_one_rank_is_shorter():
    """No transport, nothing sharded, nothing scaled."""
    serial = dataclasses.replace(
        PLAN,
        size=1,
        hosts=1,
        training=plan.Rows("arrays", 64, 100, steps=2),
        validation=None,
        rates=(plan.Rate("0.1", "0.1"),),
    )
    box = str(serial)
    for text in ("1 (serial)", "64 rows ", "2 an epoch", "learning rate  0.1 "):
        assert text in box
    for text in ("transport", "global", "→"):
        assert text not in box


def test_a_shared_batch_shows_the_rows_of_each_rank():
    """96 rows on five ranks."""
    rows = plan.Rows("arrays", 96, 960, steps_before=10, steps=10, is_global=True)
    shared = dataclasses.replace(PLAN, size=5, training=rows)
    box = str(shared)
    assert "96 global: 20 + 4 × 19 rows" in box and "10 an epoch" in box
    assert shared.global_batch == 96
    even = dataclasses.replace(shared, size=3)
    assert "96 global: 3 × 32 rows" in str(even)
