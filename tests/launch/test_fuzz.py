"""Random messages neither end nor confuse the store of a job."""

import random
import socket
import threading

import pytest

from keras_dist.launch.signing import derive_secret
from keras_dist.launch.store import Store, find_store, store_variables

MESSAGES = 10_000
SECRET = "the secret of the job"


def mutated(generator, message):
    """A message with a few changes: bytes replaced, left out, or repeated."""
    changed = bytearray(message)
    for _ in range(generator.randint(0, 4)):
        begin = generator.randrange(len(changed) + 1)
        end = min(len(changed), begin + generator.randint(0, 12))
        kind = generator.randrange(4)
        if kind == 0:
            changed[begin:end] = generator.randbytes(end - begin)
        elif kind == 1:
            del changed[begin:end]
        elif kind == 2:
            changed[begin:begin] = changed[begin:end] * generator.randint(1, 40)
        else:
            del changed[begin:]
    return bytes(changed)


@pytest.fixture
def store():
    """A store with values, and the variables by which ranks find it."""
    store = Store(SECRET)
    yield store, store_variables("127.0.0.1", store.port, SECRET)
    store.shutdown()


def request(method, path, body=b"", *lines):
    """A request of HTTP."""
    head = [f"{method} {path} HTTP/1.1", "Host: a", *lines]
    return "\r\n".join([*head, f"Content-Length: {len(body)}", "", ""]).encode() + body


def answer_of(server, message):
    """What the store answers, without a thread of its own."""
    near, far = socket.socketpair()
    with near, far:
        near.sendall(message[:100_000])
        near.shutdown(socket.SHUT_WR)
        server.finish_request(far, ("10.0.0.1", 1))
        far.shutdown(socket.SHUT_WR)
        return near.recv(1000)


def test_a_stranger_changes_nothing_in_the_store(store, capfd):
    """Random requests without the token, many of which were valid with it."""
    generator = random.Random(17)
    own, variables = store
    ranks = find_store(variables)
    assert ranks.put("beat.0", 1) and ranks.put("host.1", {"saved": True})
    before, token = dict(own.values), own.token.decode()
    tokens = [
        "",
        "0" * 32,
        SECRET,
        token[:31],
        derive_secret("another", "store"),
        "ü",
    ]
    accepted = []
    for _ in range(MESSAGES):
        method = generator.choice(["GET", "PUT", "DELETE", "HEAD", "POST", "get"])
        path = f"/{generator.choice(tokens)}/0:{own.port}/keras_dist_watch/beat.0"
        message = mutated(generator, request(method, path, b'{"saved": true}'))
        if generator.random() < 0.1:
            message = generator.randbytes(generator.randint(0, 300))
        status = answer_of(own, message).split(b"\r\n")[0].split(b" ")[1:2]
        accepted += [message] if status == [b"200"] else []
    assert accepted == []
    assert own.values == before
    assert ranks.get("beat.0") == 1
    assert capfd.readouterr().err == ""


def test_what_a_rank_sends_by_mistake_ends_neither_store_nor_launcher(store, capfd):
    """With the token, over connections of their own; the store answers the next one."""
    generator = random.Random(18)
    own, variables = store
    ranks, threads = find_store(variables), threading.active_count()
    path = f"/{own.token.decode()}/0:{own.port}/keras_dist_watch/"
    for number in range(500):
        name = generator.choice(["beat.0", "host.0", "a/b", "", "*", "x*", "../x"])
        message = request(generator.choice(["GET", "PUT", "DELETE"]), path + name, b"1")
        with socket.create_connection(("127.0.0.1", own.port)) as link:
            link.sendall(mutated(generator, message))
            if number % 2:
                link.shutdown(socket.SHUT_WR)
                link.recv(100)
    assert ranks.put("beat.0", 7) and ranks.get("beat.0") == 7
    assert threading.active_count() < threads + 300
    assert capfd.readouterr().err == ""
