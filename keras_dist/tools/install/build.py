"""Build a wheel of Horovod in a temporary folder."""

import os
from pathlib import Path

from keras_dist.tools.install import patch
from keras_dist.tools.install.facts import Facts
from keras_dist.tools.install.flags import (
    HOROVOD,
    TOOLS,
    Choice,
    build_environment,
    link_nccl,
)
from keras_dist.tools.install.steps import PIP, Steps


def build_wheel(facts: Facts, choice: Choice, folder: Path, steps: Steps) -> Path:
    """Build the wheel in a folder below `folder`, and return its path.

    Args:
        facts: What this environment has.
        choice: What Horovod is built with.
        folder: An empty folder.
        steps: Runs the commands.

    Raises:
        InstallError: If a step of the build fails.
    """
    tools, wheels, nccl_home = folder / "tools", folder / "wheels", folder / "nccl"
    steps.run(
        "Fetching the build tools", [*PIP, "install", "--target", str(tools), *TOOLS]
    )
    if choice.nccl:
        link_nccl(facts, nccl_home)
    env = build_environment(
        os.environ, facts=facts, choice=choice, tools=tools, nccl_home=nccl_home
    )
    # Without isolation the build finds the installed TensorFlow. Without the cache pip
    # does not take a wheel that it has built for another TensorFlow.
    options = ["--no-deps", "--no-build-isolation", "--no-cache-dir"]
    fetch = [*PIP, "download", *options, "--no-binary", "horovod", "-d", str(folder)]
    steps.run(
        "Fetching the source of Horovod", [*fetch, f"horovod=={HOROVOD}"], env=env
    )
    source = patch.unpack(next(folder.glob("horovod-*.tar.gz")), folder / "source")
    for change in patch.patches():
        patch.apply(source, change)
        print(f"Patched {change.file}: {change.title}")
    steps.run(
        "Building Horovod",
        [*PIP, "wheel", *options, "-v", "-w", str(wheels), str(source)],
        env=env,
        has_percent=True,
    )
    return next(wheels.glob("horovod-*.whl"))
