"""Another account of the machine cannot make a launcher write where it wants."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from harness.launching import write_script
from harness.meeting import ended, meet

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="left out: only root can act as another account"
)

_NOBODY = 65534

# Each name that was ever seen in a folder is made anew as soon as it is free: a folder
# of the account's own, whose files are links to a file that it cannot even read.
_ATTACK = """
cd "$1" && touch ready && names=
while :; do
    for name in * $names; do
        case " $names " in *" $name "*) ;; *) names="$names $name";; esac
        if mkdir -m 777 "$name" 2>/dev/null; then
            for rank in 0 1; do for file in record report report.json report.crash; do
                ln -s "$2" "$name/$rank.$file"
            done; done
        fi
    done
done
"""

# The first host has ended its rank, and removed its files, before the second one fails.
_RESTARTED = """
import os, sys, time
time.sleep(float(os.environ["HOROVOD_RANK"]))
sys.exit("KERAS_DIST_RESTART" not in os.environ)
"""


@pytest.fixture
def temporary():
    """A folder like `/tmp`, to which all accounts can write."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def test_another_account_does_not_lead_a_restarted_job_to_a_file(
    temporary, tmp_path, monkeypatch, left_behind
):
    """By links of the names that the job has had before; it leaves none behind."""
    secret = tmp_path / "secret"
    secret.write_text("mine")
    secret.chmod(0o600)
    words = ["sh", "-c", _ATTACK, "sh", temporary, secret]
    attack = subprocess.Popen(words, user=_NOBODY, group=_NOBODY, extra_groups=[])
    monkeypatch.setenv("TMPDIR", str(temporary))
    try:
        jobs = meet("--restarts", 1, write_script(tmp_path, _RESTARTED))
        found = ended(*jobs)
    finally:
        attack.kill()
        attack.wait()
    assert (temporary / "ready").exists()
    assert secret.read_text() == "mine", found
    assert [code for code, *_ in found] == [0, 0], found
    left = [path for path in temporary.iterdir() if path.stat().st_uid != _NOBODY]
    assert left == []
