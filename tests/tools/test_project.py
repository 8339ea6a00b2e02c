"""The files around the package agree with each other: workflows, recipe, lock."""

import re
import tomllib

import pytest
import yaml
from harness.launching import ROOT
from harness.pages import pyproject

from keras_dist import version
from keras_dist.tools.install.facts import HOROVOD

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PACKAGE = pyproject()["project"]


def load(path):
    """What a file of YAML says; `on` is no boolean."""
    data = yaml.safe_load(path.read_text())
    return {"on" if key is True else key: value for key, value in data.items()}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_is_limited_in_time_and_rights_and_runs_fixed_code(path):
    """Actions are named by digest, and each `make` target is there."""
    workflow = load(path)
    assert workflow.keys() >= {"name", "on", "permissions", "jobs"}
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 180 and job["runs-on"] == "ubuntu-24.04"
        assert set(job.get("needs", "").split()) <= set(workflow["jobs"])
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step), step
            action = step.get("uses", f"a/b@{40 * '0'}")
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action)
    text = path.read_text()
    assert len(re.findall(r"uses: \S+ # v[\d.]+\n", text)) == text.count("uses: ")
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"run: make ([\w-]+)", text):
        assert re.search(rf"^([\w-]+ )*{target}( [\w-]+)*:", makefile, re.MULTILINE)


def test_skips_in_ci_are_expected_by_name():
    """Where a job runs all tests, any other skip fails it."""
    (job,) = load(ROOT / ".github" / "workflows" / "test.yml")["jobs"].values()
    assert job["env"]["EXPECTED_SKIPS"]
    assert "--privileged" in job["container"]["options"]


def test_wheels_of_horovod_are_built_for_each_supported_pair():
    """As `make wheels` does; and Horovod's version in a command is the package's."""
    path = ROOT / ".github" / "workflows" / "wheels.yml"
    matrix = load(path)["jobs"]["build"]["strategy"]["matrix"]
    first, last = version.FIRST_TENSORFLOW[1], version.LAST_TENSORFLOW[1]
    assert matrix["tensorflow"] == [f"2.{minor}" for minor in range(first, last + 1)]
    makefile = (ROOT / "Makefile").read_text()
    assert f"TENSORFLOWS ?= {' '.join(matrix['tensorflow'])}\n" in makefile
    pythons = [f"python{python}" for python in matrix["python"]]
    assert f"PYTHONS ?= {' '.join(pythons)}\n" in makefile
    assert f"Horovod {HOROVOD} " in path.read_text()


def test_the_recipe_for_conda_has_the_versions_of_the_metadata():
    """Of the package, of Python, and of all that it imports."""
    recipe = load(ROOT / "conda" / "recipe.yaml")
    assert recipe["context"]["version"] == version.__version__
    run = {each.replace(" ", "") for each in recipe["requirements"]["run"]}
    python = f"python{PACKAGE['requires-python']}"
    extras = PACKAGE["optional-dependencies"]["tensorflow"]
    assert run == {"__linux", python, *PACKAGE["dependencies"], *extras}
    host = {each.replace(" ", "") for each in recipe["requirements"]["host"]}
    assert host == {"pip", python, *pyproject()["build-system"]["requires"]}
    (script,) = PACKAGE["scripts"].items()
    assert recipe["build"]["python"]["entry_points"] == [" = ".join(script)]
    assert recipe["about"]["homepage"] == PACKAGE["urls"]["Source"]


def test_the_lock_names_public_places_alone():
    """And fits the groups of pyproject.toml, as far as names go."""
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    hosts = set(re.findall(r"https?://([^/\"]+)", (ROOT / "uv.lock").read_text()))
    assert hosts == {"pypi.org", "files.pythonhosted.org"}
    locked = {package["name"] for package in lock["package"]}
    for group in pyproject()["dependency-groups"].values():
        wanted = [each for each in group if isinstance(each, str)]
        assert {re.match(r"[\w-]+", each)[0] for each in wanted} <= locked
