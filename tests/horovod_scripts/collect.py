"""Write what all scripts have recorded on all ranks into one file.

    python collect.py FOLDER_OF_RESULTS FILE.json

One line for each script, so that a difference can be read.
"""

import json
import sys
from pathlib import Path


def main(folder, file):
    """By script, a list of what each rank has recorded."""
    found = {}
    for path in sorted(Path(folder).glob("*.json")):
        found.setdefault(path.name.split(".")[0], []).append(
            rounded(json.loads(path.read_text()))
        )
    lines = [f"{json.dumps(name)}: {json.dumps(found[name])}" for name in found]
    Path(file).write_text("{\n" + ",\n".join(lines) + "\n}\n")


def rounded(value):
    """Eight digits, which is what a float32 has."""
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return float(f"{value:.8g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main(*sys.argv[1:])
