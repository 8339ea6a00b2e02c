"""The page of a training, and of a study: its numbers are those of the JSON."""

import html
import importlib.util
import json
import re
from pathlib import Path

import pytest
import vl_convert

from keras_dist.report import training_page, write_whole
from keras_dist.report.training import (
    PHASES,
    accuracy_in,
    limits_of,
    phases_of,
    reached,
)
from keras_dist.tools.scale.command import page_of
from keras_dist.tools.scale.results import price_of, results_of
from keras_dist.tools.scale.scale_page import scale_page

REPORTS = sorted((Path(__file__).parents[2] / "docs" / "reports").glob("*.json"))


def rank_of(rank, size, *, rows=96, seconds=2.0, first=0.5, waiting=0.0):
    """What one rank did in an epoch: the last rank makes the others wait."""
    averaging, waiting = (0.25, waiting) if size > 1 else (0.0, 0.0)
    return {
        "rank": rank,
        "rows": rows,
        "seconds": seconds,
        "first": first,
        "computing": seconds - averaging - waiting - 0.125,
        "averaging": averaging,
        "waiting": waiting,
        "input": 0.125,
        "last_fraction": float(rank == size - 1) if size > 1 else 0.0,
        "memory": 500_000_000 + rank,
        "gpu_memory": None,
    }


def training_of(size, *, accuracies=(0.5, 0.75, 0.9), state="finished", speed=1.0):
    """The JSON of a training of some epochs of three steps of 32 rows of each rank."""
    epochs = []
    for number, accuracy in enumerate(accuracies, 1):
        first = 0.5 if number == 1 else 0.0
        waits = [0.125 * (rank < size - 1) for rank in range(size)]
        ranks = [
            rank_of(rank, size, first=first, seconds=2.0 / speed + first, waiting=wait)
            for rank, wait in enumerate(waits)
        ]
        epochs.append(
            {
                "epoch": number,
                "seconds": 3.0 * number / speed,
                "training_seconds": ranks[0]["seconds"],
                "epoch_seconds": ranks[0]["seconds"] + 0.5,
                "steps": 3,
                "rows": 96 * size * number,
                "rows_per_second": 96 * size / ranks[0]["seconds"],
                "steady_rows_per_second": 48 * size * speed + number,
                "logs": {"loss": "nan", "accuracy": 0.3, "val_accuracy": accuracy},
                "rates": {"effective_learning_rate": 0.001 * size},
                "ranks": ranks,
            }
        )
    return {
        "format": 1,
        "kind": "training",
        "title": "<script>.py",
        "began": "2026-11-23 06:00:00+00:00",
        "version": "0.1.0",
        "size": size,
        "hosts": 1,
        "devices": ["CPU, 1 thread each"] * size,
        "model": "sequential",
        "parameters": 10,
        "gradient_bytes": 40,
        "batch": 32,
        "epochs_planned": 3,
        "plan": [["ranks", f"{size} on 1 host"]],
        "state": state,
        "epochs": epochs,
        "resumes": [{"epoch": 2, "seconds": 4.5, "size": size}],
        "nan_reports": ["Epoch 1, step 2: the gradients of rank 0 are not finite."],
        "shares": [{"epoch": 1, "step": 16, "rows": [40, 24]}],
    }


def run_of(ranks, repeat=1, **options):
    """A run of a study that has finished."""
    training = training_of(ranks, **options)
    seconds = 10.0 + training["epochs"][-1]["seconds"]
    return {
        "ranks": ranks,
        "repeat": repeat,
        "exit_code": 0,
        "seconds": seconds,
        "state": "finished",
        "cause": "",
        "training": training,
    }


def study_of(runs, **options):
    """The JSON of a study."""
    return {
        "format": 1,
        "kind": "scale",
        "version": "0.1.0",
        "written": "2026-11-23 07:00:00+00:00",
        "script": "script.py",
        "command": "keras-dist scale -np 1,2 script.py",
        "arguments": [],
        "epochs": None,
        "repeats": 1,
        "price": None,
        "is_whole": True,
        "planned": len(runs),
        **results_of(runs, **options),
        "runs": runs,
    }


def embedded(page):
    """The JSON of a page, and the specifications of its charts by their titles."""
    pattern = r'<script type="application/json" id="([\w-]+)">(.*?)</script>'
    found = {name: json.loads(text) for name, text in re.findall(pattern, page, re.S)}
    titles = re.findall(
        r'<figure data-chart="([\w-]+)"><figcaption>(.*?)<(?:small|/figcaption)', page
    )
    charts = {html.unescape(title): found[name] for name, title in titles}
    return found["data"], charts


def cells_of(page, title):
    """The cells of the first table behind a heading, row by row."""
    section = page.partition(f"<h2>{title}</h2>")[2].partition("</section>")[0]
    rows = re.findall(r"<tr>(.*?)</tr>", section)
    return [
        [html.unescape(cell) for cell in re.findall(r"<t[hd]>(.*?)</t[hd]>", row)]
        for row in rows
    ]


@pytest.fixture(autouse=True)
def no_bundle(monkeypatch):
    """Pages without Vega-Lite itself, which takes three seconds."""
    monkeypatch.setattr("keras_dist.report.page.javascript", lambda: "")


def values(spec):
    """All values of a chart."""
    found = list(spec.get("data", {}).get("values", []))
    return found + [value for layer in spec.get("layer", []) for value in values(layer)]


def test_the_numbers_of_a_training_are_those_of_its_json():
    """In the charts, in the table, and all of them as JSON."""
    content = training_of(2)
    page = training_page(content)
    data, charts = embedded(page)
    assert data == content
    head, *rows = cells_of(page, "Epochs")
    assert len(rows) == len(content["epochs"])
    for row, epoch in zip(rows, content["epochs"], strict=True):
        cells = dict(zip(head, row, strict=True))
        assert cells["val_accuracy"] == f"{epoch['logs']['val_accuracy']:g}"
        assert cells["rows"] == str(epoch["rows"])
        assert cells["rows/s"] == f"{epoch['steady_rows_per_second']:g}"
        assert cells["loss"] == "nan"
    shown = [v["value"] for v in values(charts["accuracy"]) if v["data"] != "training"]
    assert shown == [epoch["logs"]["val_accuracy"] for epoch in content["epochs"]]
    for rank in range(2):
        for phase in PHASES:
            of_rank = [e["ranks"][rank][phase] for e in content["epochs"]]
            (value,) = [
                v["seconds"]
                for v in values(charts["Seconds of each rank"])
                if (v["rank"], v["phase"]) == (rank, phase)
            ]
            assert value == sum(of_rank)
    for text in ("Resumed in epoch 2", "the gradients of rank 0", "&lt;script&gt;.py"):
        assert text in page


def test_the_numbers_of_a_study_are_those_of_its_json():
    """In the charts, in the tables, and all of them as JSON."""
    content = study_of([run_of(1), run_of(2, speed=0.9)], target=0.75)
    page = scale_page(content)
    data, charts = embedded(page)
    assert data == content
    head, *rows = cells_of(page, "Speed")
    for cells, row in zip(rows, content["by_ranks"], strict=True):
        assert cells[head.index("ranks")] == str(row["ranks"])
        assert cells[head.index("rows/s")] == f"{row['rows_per_second']['median']:.4g}"
    speeds = [v for v in values(charts["Rows per second"]) if v["kind"] == "measured"]
    for row in content["by_ranks"]:
        expected = row["rows_per_second"]
        shown = [v for v in speeds if v["ranks"] == row["ranks"]]
        assert shown and all(v["value"] == expected["median"] for v in shown)
        assert all(v["low"] == expected["low"] for v in shown)
    curves = values(charts["val_accuracy over rows"])
    assert [(v["ranks"], v["rows"], v["value"]) for v in curves] == [
        (str(run["ranks"]), epoch["rows"], epoch["logs"]["val_accuracy"])
        for run in content["runs"]
        for epoch in run["training"]["epochs"]
    ]
    for row in content["by_ranks"]:
        seconds = row["to_target"]["seconds"]["median"]
        assert f"0.75 after {seconds:.2f} s" in page


def test_repeats_and_costs_of_a_page_are_those_of_its_json():
    """Of two runs on each number of ranks, one of which has failed."""
    runs = [run_of(1), run_of(2), run_of(1, 2, speed=0.5), run_of(2, 2)]
    runs[3] |= {"state": "failed", "cause": "no disk", "training": None}
    price = price_of("3.6/hour")
    content = study_of(runs, target=0.75, price=price)
    content |= {"price": vars(price) | {"text": str(price)}, "repeats": 2}
    page = scale_page(content)
    speeds, phases = cells_of(page, "Speed"), cells_of(page, "Where the time goes")
    for row, of_speed, of_phases in zip(
        content["by_ranks"], speeds[1:], phases[1:], strict=True
    ):
        rate, cost = row["rows_per_second"], row["cost"]
        shown = [f"{rate[key]:.4g}" for key in ("median", "low", "high")]
        assert of_speed[:6] == [f"{row['ranks']}", "1", f"{row['runs']}", *shown]
        assert of_phases[-2:] == [f"{cost[key]:.3g}" for key in ("run", "to_target")]
    assert [row[0] for row in speeds[1:]] == ["1", "2"]
    assert [row[2] for row in speeds[1:]] == ["2", "1"]
    bars = values(embedded(page)[1]["Cost of a run"])
    costs = [row["cost"]["to_target"] for row in content["by_ranks"]]
    assert [bar["value"] for bar in bars] == costs
    for cells, run in zip(cells_of(page, "Runs")[1:], runs, strict=True):
        assert cells[:3] == [str(run["ranks"]), str(run["repeat"]), run["state"]]
        assert cells[-1] == run["cause"]


def test_a_failed_run_is_in_the_report_with_its_cause():
    """Also where all have failed."""
    failed = run_of(2) | {
        "state": "failed",
        "cause": "rank 1: <no> disk",
        "exit_code": 1,
    }
    for training in (None, training_of(2, state="running")):
        runs = [run_of(1), failed | {"training": training}]
        page = scale_page(study_of(runs))
        assert "Run 1 on 2 ranks failed: rank 1: &lt;no&gt; disk." in page
        assert ["2", "1", "failed"] in [row[:3] for row in cells_of(page, "Runs")]
        assert [row["ranks"] for row in results_of(runs)["by_ranks"]] == [1]
    page = scale_page(study_of([failed | {"training": None}]))
    assert "No run has finished" in page and "rank 1: &lt;no&gt; disk" in page


@pytest.mark.parametrize("size", [1, 2])
def test_every_chart_can_be_drawn(size):
    """Vega-Lite draws each of them, and finds all of its fields."""
    pages = [
        training_page(training_of(size)),
        scale_page(study_of([run_of(n) for n in range(1, size + 1)])),
    ]
    for page in pages:
        _, charts = embedded(page)
        assert charts
        for title, spec in charts.items():
            drawn = vl_convert.vegalite_to_svg(spec | {"width": 300})
            assert drawn.startswith("<svg"), title
            assert "NaN" not in drawn and "undefined" not in drawn, title


def test_a_page_needs_no_network_and_has_both_color_schemes():
    """No address is loaded, and the narrow window has its width."""
    for page in (training_page(training_of(1)), scale_page(study_of([run_of(1)]))):
        outside = re.sub(r"<script.*?</script>", "", page, flags=re.S)
        assert not re.search(r"""(src|href)=|url\(|@import""", outside)
        assert "@media (prefers-color-scheme: dark)" in page
        assert 'content="width=device-width, initial-scale=1"' in page


def test_the_text_of_a_script_does_not_end_its_element():
    """A name with markup stays a name."""
    content = training_of(1) | {"model": "</script><b>"}
    page = training_page(content)
    data, _ = embedded(page)
    assert data == content
    assert "</script><b>" not in page


def test_without_its_packages_a_page_is_an_error_that_names_them(monkeypatch):
    """And says what to install, and what is possible without."""
    find = importlib.util.find_spec

    def found(name):
        return None if name == "jinja2" else find(name)

    monkeypatch.setattr(importlib.util, "find_spec", found)
    error = r"Received: an environment without jinja2\. Run: pip install 'keras-dist\["
    with pytest.raises(ImportError, match=error):
        training_page(training_of(1))


def test_phases_add_up_and_a_traced_step_is_left_out():
    """It is phase of computing, and does not come again."""
    epochs = training_of(2)["epochs"]
    for some in (epochs, epochs[:1]):
        phases = phases_of(some)
        assert sum(phases.values()) == pytest.approx(1)
        assert phases["averaging"] == pytest.approx(0.25 / 2.0)
        assert phases["input"] == pytest.approx(0.125 / 2.0)


def test_what_takes_the_time_is_said_in_words():
    """The largest phase first, and nothing where no phase is large."""
    phases = {"computing": 0.3, "averaging": 0.2, "waiting": 0.1, "input": 0.4}
    words = limits_of(phases, [0.1, 0.1, 0.8])
    named = [text.partition(":")[0] for text in words]
    assert named == ["input", "averaging", "waiting"]
    assert "for rank 2 in 80 % of the steps" in words[-1]
    assert (
        limits_of({"computing": 0.95, "averaging": 0.05, "waiting": 0, "input": 0})
        == []
    )


def test_the_accuracy_is_found_by_any_name():
    """On validation data before training data; a target is reached once."""
    assert accuracy_in(["loss", "accuracy"]) == "accuracy"
    assert (
        accuracy_in(["acc", "val_binary_accuracy", "val_loss"]) == "val_binary_accuracy"
    )
    assert accuracy_in(["val_a/accuracy", "val_accuracy"]) == "val_accuracy"
    epochs = [{"logs": {"m": value}} for value in ("nan", 0.5, 0.8, 0.7)]
    assert reached(epochs, "m", 0.6) is epochs[2]
    assert reached([{"logs": {"val_loss": 0.3}}], "val_loss", 0.4) is not None


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_the_pages_of_the_documentation_are_made_from_their_json(path):
    """Which real runs have written, and the site links to each."""
    content = json.loads(path.read_text())
    data, charts = embedded(page_of(content))
    assert data == content and charts
    link = f'href="../reports/{path.stem}.html"'
    assert link in (REPORTS[0].parents[1] / "how_to" / "scale.md").read_text()
    assert path.stat().st_size < 200_000


@pytest.mark.parametrize("content", [[], {}, {"kind": "training", "format": 2}])
def test_a_page_is_made_of_known_content_alone(content):
    """What else is there is named."""
    with pytest.raises(ValueError, match=r"from the JSON of a training.*Received"):
        page_of(content)


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    """And nothing else is left in its folder."""
    path = tmp_path / "run.json"
    write_whole(path, "before")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "\ud800")
    assert path.read_text() == "before"
    assert [file.name for file in tmp_path.iterdir()] == ["run.json"]
