"""The page of one training, from its JSON."""

from collections.abc import Mapping, Sequence
from typing import Any

from keras_dist.report.page import (
    Chart,
    Section,
    Spec,
    Table,
    bars,
    category,
    color,
    lines,
    number,
    page,
    phases_color,
    tips,
    whole,
)
from keras_dist.report.training import (
    PHASES,
    counted,
    is_better_low,
    last_fractions,
    limits_of,
    median_rate,
    metric_in,
    numbers_in,
    percent,
    phases_of,
    rounded,
    seconds,
    size,
)

Content = Mapping[str, Any]

# Logs that have charts of their own.
_OTHERS = {"rows_per_second", "training_seconds", *PHASES}

# Of more ranks than this, only those that are last most often are shown one by one.
_MOST_RANKS = 64


def training_page(content: Content) -> str:
    """Return the page as HTML.

    Args:
        content: The JSON of a training, from `Training.as_json`.

    Raises:
        ImportError: If a package of the extra `report` is not installed.
    """
    ranks = f"{counted(content['size'], 'rank')} on {counted(content['hosts'], 'host')}"
    return page(
        title=content["title"],
        subtitle=(
            f"{content['model']}, {content['parameters']:,} parameters; {ranks}, "
            f"{', '.join(dict.fromkeys(content['devices']))}; began "
            f"{content['began']}; {_state(content)}; keras_dist {content['version']}"
        ),
        tiles=_tiles(content),
        sections=_sections(content),
        data=content,
    )


def _state(content: Content) -> str:
    done, planned = len(content["epochs"]), content["epochs_planned"]
    of = f"epoch {done} of {planned}"
    states = {
        "finished": f"finished after {counted(done, 'epoch')}",
        "stopped": f"stopped after {of}",
    }
    return states.get(content["state"], f"not ended: written after {of}")


def _tiles(content: Content) -> list[tuple[str, str]]:
    epochs = content["epochs"]
    tiles = [("ranks", str(content["size"]))]
    if not epochs:
        return tiles
    last = epochs[-1]
    tiles += [
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
    epochs = content["epochs"]
    if not epochs:
        return [Section("", ["The first epoch has not ended yet."])]
    events = _events(content)
    return [
        Section("What takes the time", _limits(epochs)),
        Section("Learning", charts=_learning(epochs)),
        Section("Speed", charts=_speed(epochs)),
        Section("Ranks", charts=_ranks(epochs)),
        *([Section("Events", events)] if events else []),
        Section("Epochs", tables=[_table(epochs)]),
        Section("Plan", code="\n".join(f"{n:<14} {t}" for n, t in content["plan"])),
    ]


def _limits(epochs: Sequence[Content]) -> list[str]:
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
    return words


def _learning(epochs: Sequence[Content]) -> list[Chart]:
    names = dict.fromkeys(name for epoch in epochs for name in epoch["logs"])
    bases = dict.fromkeys(
        name.removeprefix("val_")
        for name in names
        if name not in _OTHERS and not name.startswith("effective_learning_rate")
    )
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
    spec = lines(
        values,
        whole("epoch"),
        number("value", base),
        by=color("data"),
        tooltip=tips(data="data", epoch="epoch", value=(base, ".5g")),
    )
    return Chart(base, spec)


def _rates(epochs: Sequence[Content]) -> Chart:
    values = [
        {"epoch": epoch["epoch"], "value": rate, "name": name}
        for epoch in epochs
        for name, rate in epoch["rates"].items()
    ]
    spec = lines(
        values,
        whole("epoch"),
        number("value", "learning rate", zero=True),
        by=color("name") if len({v["name"] for v in values}) > 1 else None,
        tooltip=tips(epoch="epoch", value=("rate", ".4g")),
    )
    return Chart("Effective learning rate", spec, "that the last update used")


def _speed(epochs: Sequence[Content]) -> list[Chart]:
    rows = lines(
        [
            {"epoch": epoch["epoch"], "rows": epoch["steady_rows_per_second"]}
            for epoch in epochs
        ],
        whole("epoch"),
        number("rows", "rows/s", zero=True, form="~s"),
        tooltip=tips(epoch="epoch", rows=("rows/s", ",.0f")),
    )
    phases = bars(
        [
            {
                "epoch": epoch["epoch"],
                "phase": phase,
                "order": order,
                "fraction": fraction,
            }
            for epoch in epochs[:: -(-len(epochs) // 100)]
            for order, (phase, fraction) in enumerate(phases_of([epoch]).items())
        ],
        category("epoch"),
        number("fraction", "of the time", form=".0%", zero=True),
        by=phases_color(),
        tooltip=tips(epoch="epoch", phase="phase", fraction=("of the time", ".1%")),
    )
    return [
        Chart("Rows per second of all ranks", rows, "without a step of tracing"),
        Chart("Where the time goes", phases, "of all ranks, by epoch"),
    ]


def _ranks(epochs: Sequence[Content]) -> list[Chart]:
    last = last_fractions(epochs)
    shown = sorted(sorted(range(len(last)), key=lambda r: -last[r])[:_MOST_RANKS])
    note = "" if len(shown) == len(last) else f"the {len(shown)} that are last most"
    times = [
        {"rank": rank, "phase": phase, "order": order, "last": last[rank]}
        | {"seconds": sum(e["ranks"][rank][phase] for e in epochs)}
        for rank in shown
        for order, phase in enumerate(PHASES)
    ]
    stack = bars(
        times,
        category("rank"),
        number("seconds", "seconds", zero=True),
        by=phases_color(),
        tooltip=tips(
            rank="rank",
            phase="phase",
            seconds=("seconds", ",.2f"),
            last=("last to arrive, of the steps", ".0%"),
        ),
    )
    return [
        Chart("Seconds of each rank", stack, note or "stragglers wait least"),
        Chart(
            "Memory of each rank",
            _memory(epochs[-1]["ranks"], shown),
            "the most so far",
        ),
    ]


def _memory(of: Sequence[Content], ranks: Sequence[int]) -> Spec:
    kinds = {"process": "memory", "GPU": "gpu_memory"}
    values = [
        {"rank": rank, "kind": kind, "order": 0, "gigabytes": of[rank][name] / 1e9}
        for rank in ranks
        for kind, name in kinds.items()
        if of[rank][name] is not None
    ]
    spec = bars(
        values,
        category("rank"),
        number("gigabytes", "GB", zero=True),
        by=color("kind"),
        tooltip=tips(rank="rank", gigabytes=("GB", ".2f")),
    )
    spec["encoding"]["xOffset"] = {"field": "kind"}
    spec["mark"].pop("width")
    return spec


def _events(content: Content) -> list[str]:
    resumes = [
        f"- Resumed in epoch {resume['epoch']} on {counted(resume['size'], 'rank')}, "
        f"after {seconds(resume['seconds'])} of training."
        for resume in content["resumes"]
    ]
    shares = [
        f"- Epoch {change['epoch']}, after step {change['step']}: a batch is divided "
        f"into {' + '.join(f'{rows:,}' for rows in change['rows'])} rows."
        for change in content.get("shares", ())
    ]
    return [*resumes, *shares, *(f"- {text}" for text in content["nan_reports"])]


def _table(epochs: Sequence[Content]) -> Table:
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
