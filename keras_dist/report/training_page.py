"""The page of one training, from its JSON."""

from collections.abc import Mapping, Sequence
from typing import Any

from keras_dist.report import charts
from keras_dist.report.accuracy import is_better_low, metric_in
from keras_dist.report.limits import last_fractions, limits_of
from keras_dist.report.numbers import counted, percent, rounded, seconds, size
from keras_dist.report.page import Chart, Section, Table, page
from keras_dist.report.training import PHASES, median_rate, numbers_in, phases_of

Content = Mapping[str, Any]

# Logs that have charts of their own.
_OTHERS = {"rows_per_second", "training_seconds", *PHASES}

# More ranks than this are not shown one by one: those that are last most often are.
_MOST_RANKS = 64


def training_page(content: Content) -> str:
    """The page as HTML.

    Args:
        content: The JSON of a training, as `Training.as_json` gives it.
    """
    done = len(content["epochs"])
    ranks = f"{counted(content['size'], 'rank')} on {counted(content['hosts'], 'host')}"
    return page(
        title=content["title"],
        subtitle=(
            f"{content['model']}, {content['parameters']:,} parameters; {ranks}, "
            f"{_devices(content['devices'])}; began {content['began']}; "
            f"{_state(content)}; keras_dist {content['version']}"
        ),
        tiles=_tiles(content),
        sections=_sections(content) if done else [_nothing()],
        data=content,
    )


def _nothing() -> Section:
    return Section("", ["The first epoch has not ended yet."])


def _state(content: Content) -> str:
    done, planned = len(content["epochs"]), content["epochs_planned"]
    of = f"epoch {done} of {planned}"
    states = {
        "finished": f"finished after {counted(done, 'epoch')}",
        "stopped": f"stopped after {of}",
    }
    return states.get(content["state"], f"not ended: written after {of}")


def _devices(devices: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(devices))


def _tiles(content: Content) -> list[tuple[str, str]]:
    epochs = content["epochs"]
    if not epochs:
        return [("ranks", str(content["size"]))]
    last = epochs[-1]
    tiles = [
        ("ranks", str(content["size"])),
        ("rows/s of all ranks", rounded(median_rate(epochs))),
        (f"epochs of {content['epochs_planned']}", str(len(epochs))),
        ("since the first step", seconds(last["seconds"])),
        ("rows trained on", f"{last['rows']:,}"),
    ]
    name = metric_in(list(last["logs"]))
    values = [v for v in numbers_in(epochs, name or "") if v is not None]
    if name and values:
        best = min(values) if is_better_low(name) else max(values)
        tiles.append((f"best {name}", rounded(best)))
    return tiles


def _sections(content: Content) -> list[Section]:
    return [
        _limits(content),
        Section("Learning", charts=_learning(content)),
        Section("Speed", charts=_speed(content)),
        Section("Ranks", charts=_ranks(content)),
        *_events(content),
        Section("Epochs", tables=[_table(content)]),
        Section("Plan", code="\n".join(f"{n:<14} {t}" for n, t in content["plan"])),
    ]


def _limits(content: Content) -> Section:
    epochs = content["epochs"]
    phases = phases_of(epochs)
    found = limits_of(phases, last_fractions(epochs))
    fractions = ", ".join(f"{percent(phases[phase])} {phase}" for phase in PHASES)
    words = [
        f"Of the time of all ranks: {fractions}.",
        *(f"- {text}" for text in found),
    ]
    trained = sum(epoch["training_seconds"] for epoch in epochs)
    outside = 1 - trained / sum(epoch["epoch_seconds"] for epoch in epochs)
    if outside >= 0.1:
        words.append(
            f"- Validation and callbacks take {percent(outside)} of the epochs."
        )
    first = max(rank["first"] for epoch in epochs for rank in epoch["ranks"])
    if first:
        words.append(
            f"The first step, with tracing, took {seconds(first)}, which is left out."
        )
    return Section("What takes the time", words)


def _learning(content: Content) -> list[Chart]:
    epochs = content["epochs"]
    names = list(dict.fromkeys(name for epoch in epochs for name in epoch["logs"]))
    plain = [
        name
        for name in names
        if name not in _OTHERS and not name.startswith("effective_learning_rate")
    ]
    bases = list(dict.fromkeys(name.removeprefix("val_") for name in plain))
    found = [_curve(epochs, base) for base in bases if base != "learning_rate"]
    return [*found, _rates(epochs)]


def _curve(epochs: Sequence[Content], base: str) -> Chart:
    kinds = {"training": base, "validation": f"val_{base}"}
    values = [
        {"epoch": epoch["epoch"], "value": value, "data": kind}
        for kind, name in kinds.items()
        for epoch, value in zip(epochs, numbers_in(epochs, name), strict=True)
        if name in epoch["logs"]
    ]
    spec = charts.lines(
        values,
        charts.whole("epoch", "epoch"),
        charts.number("value", base),
        by=charts.color("data"),
        tips=[
            charts.tip("data", "data"),
            charts.tip("epoch", "epoch"),
            charts.tip("value", base, ".5g"),
        ],
    )
    return Chart(base, spec)


def _rates(epochs: Sequence[Content]) -> Chart:
    values = [
        {"epoch": epoch["epoch"], "value": rate, "name": name}
        for epoch in epochs
        for name, rate in epoch["rates"].items()
    ]
    tips = [charts.tip("epoch", "epoch"), charts.tip("value", "rate", ".4g")]
    spec = charts.lines(
        values,
        charts.whole("epoch", "epoch"),
        charts.number("value", "learning rate", zero=True),
        by=charts.color("name") if len({v["name"] for v in values}) > 1 else None,
        tips=tips,
    )
    return Chart("Effective learning rate", spec, "that the last update used")


def _speed(content: Content) -> list[Chart]:
    epochs = content["epochs"]
    speed = [
        {"epoch": epoch["epoch"], "rows": epoch["steady_rows_per_second"]}
        for epoch in epochs
    ]
    tips = [charts.tip("epoch", "epoch"), charts.tip("rows", "rows/s", ",.0f")]
    rows = charts.lines(
        speed,
        charts.whole("epoch", "epoch"),
        charts.number("rows", "rows/s", zero=True, form="~s"),
        tips=tips,
    )
    return [
        Chart("Rows per second of all ranks", rows, "without a step of tracing"),
        Chart(
            "Where the time goes", _phases_by_epoch(epochs), "of all ranks, by epoch"
        ),
    ]


def _phases_by_epoch(epochs: Sequence[Content]) -> charts.Spec:
    shown = epochs[:: -(-len(epochs) // 100)]
    values = [
        {"epoch": epoch["epoch"], "phase": phase, "order": order, "fraction": fraction}
        for epoch in shown
        for order, (phase, fraction) in enumerate(phases_of([epoch]).items())
    ]
    return charts.bars(
        values,
        charts.category("epoch", "epoch"),
        charts.number("fraction", "of the time", form=".0%", zero=True),
        by=charts.phases_color(),
        tips=[
            charts.tip("epoch", "epoch"),
            charts.tip("phase", "phase"),
            charts.tip("fraction", "of the time", ".1%"),
        ],
    )


def _ranks(content: Content) -> list[Chart]:
    last = last_fractions(content["epochs"])
    most = sorted(range(len(last)), key=lambda rank: -last[rank])[:_MOST_RANKS]
    shown = sorted(most)
    note = "" if len(shown) == len(last) else f"the {len(shown)} that are last most"
    times = [
        {"rank": rank, "phase": phase, "order": order, "last": last[rank]}
        | {"seconds": sum(e["ranks"][rank][phase] for e in content["epochs"])}
        for rank in shown
        for order, phase in enumerate(PHASES)
    ]
    tips = [
        charts.tip("rank", "rank"),
        charts.tip("phase", "phase"),
        charts.tip("seconds", "seconds", ",.2f"),
        charts.tip("last", "last to arrive, of the steps", ".0%"),
    ]
    stack = charts.bars(
        times,
        charts.category("rank", "rank"),
        charts.number("seconds", "seconds", zero=True),
        by=charts.phases_color(),
        tips=tips,
    )
    return [
        Chart("Seconds of each rank", stack, note or "stragglers wait least"),
        Chart("Memory of each rank", _memory(content, shown), "the most so far"),
    ]


def _memory(content: Content, ranks: Sequence[int]) -> charts.Spec:
    of = content["epochs"][-1]["ranks"]
    kinds = {"process": "memory", "GPU": "gpu_memory"}
    values = [
        {"rank": rank, "kind": kind, "order": 0, "gigabytes": of[rank][name] / 1e9}
        for rank in ranks
        for kind, name in kinds.items()
        if of[rank][name] is not None
    ]
    spec = charts.bars(
        values,
        charts.category("rank", "rank"),
        charts.number("gigabytes", "GB", zero=True),
        by=charts.color("kind"),
        tips=[charts.tip("rank", "rank"), charts.tip("gigabytes", "GB", ".2f")],
    )
    spec["encoding"]["xOffset"] = {"field": "kind"}
    spec["mark"].pop("width")
    return spec


def _events(content: Content) -> list[Section]:
    words = [
        f"- Resumed in epoch {resume['epoch']} on {counted(resume['size'], 'rank')}, "
        f"after {seconds(resume['seconds'])} of training."
        for resume in content["resumes"]
    ]
    words += [f"- {text}" for text in content["nan_reports"]]
    return [Section("Events", words)] if words else []


def _table(content: Content) -> Table:
    epochs = content["epochs"]
    names = [name for name in epochs[-1]["logs"] if name not in _OTHERS]
    head = ["epoch", *names, "rows/s", *PHASES, "seconds", "rows", "memory"]
    rows = []
    for epoch in epochs:
        phases = phases_of([epoch])
        most = max(rank["memory"] or 0 for rank in epoch["ranks"])
        rows.append(
            [
                str(epoch["epoch"]),
                *(rounded(epoch["logs"].get(name)) for name in names),
                rounded(epoch["steady_rows_per_second"]),
                *(percent(phases[phase]) for phase in PHASES),
                seconds(epoch["seconds"]),
                f"{epoch['rows']:,}",
                size(most or None),
            ]
        )
    title = f"All numbers of {counted(len(epochs), 'epoch')}"
    return Table(head, rows, is_long=len(epochs) > 12, title=title)
