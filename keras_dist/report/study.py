"""What `keras-dist scale` asks of the script that it runs, in one variable."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

VARIABLE = "KERAS_DIST_STUDY"


@dataclass(frozen=True)
class Study:
    """How `dist_fit` trains as one run of a study.

    Args:
        path: Where to write the JSON of the training. Of a second `dist_fit` of the
            process it is `NAME.2.json`, and so on.
        epochs: Epochs in place of the script's own; `None` for these.
        target: Stop when the metric has reached this value; `None` for never.
        metric: The metric in the logs; `None` for the accuracy.
    """

    path: str
    epochs: int | None = None
    target: float | None = None
    metric: str | None = None

    def as_variable(self) -> dict[str, str]:
        """The variable of the environment, for the ranks."""
        return {VARIABLE: json.dumps(asdict(self))}


def study_of(environ: Mapping[str, str]) -> Study | None:
    """The study that this process is a run of, if it is one.

    >>> study_of(Study("run.json", epochs=2).as_variable())
    Study(path='run.json', epochs=2, target=None, metric=None)
    """
    text = environ.get(VARIABLE)
    return Study(**json.loads(text)) if text else None


def path_of_fit(path: str, number: int) -> str:
    """The path of a fit of the process, counted from 1.

    >>> path_of_fit("a/1-1.json", 1), path_of_fit("a/1-1.json", 2)
    ('a/1-1.json', 'a/1-1.2.json')
    """
    return path if number == 1 else f"{path.removesuffix('.json')}.{number}.json"
