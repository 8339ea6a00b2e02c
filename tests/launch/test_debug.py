"""`keras-dist run --debug`: one rank has a debugger, and the others wait for it."""

import json
import os
import pty
import re
import select
import socket
import subprocess
import sys
import time

import pytest

SCRIPT = """
import keras_dist

def doubled(value):
    breakpoint()
    return 2 * value

print("sum", keras_dist.sum(float(doubled(keras_dist.rank() + 40))), flush=True)
"""


def command(*words):
    """The command that starts two ranks."""
    return [sys.executable, "-m", "keras_dist", "run", "-np", "2", *map(str, words)]


def read_until(client, pattern):
    """Read from a debugger until it has said something; what matches that."""
    said = ""
    while (found := re.search(pattern, said)) is None:
        more = client.recv(2**16).decode()
        assert more, said
        said += more
    return found


@pytest.fixture
def script(tmp_path):
    """A script with a `breakpoint()`."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_pdb_on_the_terminal(script):
    """It stops one rank in its first line and at `breakpoint()`, and others never."""
    ours, theirs = pty.openpty()
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    typed = ["p __name__", "c", "p value", "c"]
    output, answered, end = "", 0, time.monotonic() + 90
    with subprocess.Popen(command("--debug", 1, script), **streams) as process:
        try:
            while process.poll() is None and time.monotonic() < end:
                if select.select([ours], [], [], 0.1)[0]:
                    output += os.read(ours, 2**16).decode()
                if typed and output[answered:].endswith("(Pdb) "):
                    answered = len(output)
                    os.write(ours, f"{typed.pop(0)}\n".encode())
            assert process.poll() == 0, output
        finally:
            process.terminate()
            os.close(ours)
            os.close(theirs)
    assert not typed and "'__main__'" in output
    assert "-> return 2 * value" in output and "41" in output
    assert output.count("sum 162.0") == 2


def test_debugpy_at_a_port(script):
    """The rank waits for a client, as VS Code is one, and then goes on."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    words = command("--debug", f"0:{port}", script)
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == (
                f"[0] rank 0 waits for a debugger at 127.0.0.1:{port}\n"
            )
            with socket.create_connection(("127.0.0.1", port)) as client:
                for number, (name, given) in enumerate(
                    [
                        ("initialize", {"adapterID": "python"}),
                        ("attach", {"justMyCode": False}),
                        ("configurationDone", {}),
                    ]
                ):
                    body = {"seq": number + 1, "type": "request", "command": name}
                    text = json.dumps(body | {"arguments": given})
                    client.sendall(
                        f"Content-Length: {len(text)}\r\n\r\n{text}".encode()
                    )
                    wanted = "initialized" if name == "attach" else name
                    read_until(client, f'"{wanted}"')
                # It stops at `breakpoint()`.
                found = read_until(client, r'"event": "stopped".*"threadId": (\d+)')
                thread = int(found[1])
                body = {"seq": 9, "type": "request", "command": "continue"}
                text = json.dumps(body | {"arguments": {"threadId": thread}})
                client.sendall(f"Content-Length: {len(text)}\r\n\r\n{text}".encode())
                assert process.stdout.readline().endswith("sum 162.0\n")
                assert process.stdout.readline().endswith("sum 162.0\n")
            assert process.wait(60) == 0
        finally:
            process.terminate()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--debug", "2"], "names a rank of this host"),
        (["--debug", "0:"], "names a rank of this host"),
        (["--debug", "one"], "names a rank of this host"),
        (["--debug", "1"], "needs a terminal for pdb"),
    ],
)
def test_what_cannot_be_debugged_is_an_error(script, words, text):
    """Before a rank is started."""
    done = subprocess.run(
        command(*words, script),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1 and text in done.stderr
