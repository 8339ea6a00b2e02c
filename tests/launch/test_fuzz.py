"""Random messages neither end nor confuse the store of a job."""

import random
import socket
import threading

from keras_dist.launch.signing import derive_secret

MESSAGES = 10_000


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


def test_a_stranger_changes_nothing_in_the_store(store, client, capfd):
    """Random requests without the token, many of which were valid with it."""
    generator = random.Random(17)
    assert client.put("beat.0", 1) and client.put("host.1", {"saved": True})
    before, token = dict(store.values), store.token.decode()
    tokens = ["", "0" * 32, "secret", token[:31], derive_secret("another", "store")]
    tokens += ["ü"]
    stored = f"0:{store.port}/keras_dist_watch/beat.0"
    names = ["global/0", "probe", "../etc/passwd", "", f"{stored[:-6]}*", *[stored] * 5]
    accepted = []
    for _ in range(MESSAGES):
        method = generator.choice(["GET", "PUT", "DELETE", "HEAD", "POST", "get"])
        path = f"/{generator.choice(tokens)}/{generator.choice(names)}"
        message = mutated(generator, request(method, path, b'{"saved": true}'))
        if generator.random() < 0.1:
            message = generator.randbytes(generator.randint(0, 300))
        status = answer_of(store, message).split(b"\r\n")[0].split(b" ")[1:2]
        accepted += [message] if status == [b"200"] else []
    assert accepted == []
    assert store.values == before
    assert client.get("beat.0") == 1
    assert capfd.readouterr().err == ""


def test_what_a_rank_sends_by_mistake_ends_neither_store_nor_launcher(
    store, client, capfd
):
    """With the token, over connections of their own; the store answers the next one."""
    generator, threads = random.Random(18), threading.active_count()
    path = f"/{store.token.decode()}/0:{store.port}/keras_dist_watch/"
    for number in range(500):
        name = generator.choice(["beat.0", "host.0", "a/b", "", "*", "x*", "../x"])
        message = request(generator.choice(["GET", "PUT", "DELETE"]), path + name, b"1")
        with socket.create_connection(("127.0.0.1", store.port)) as link:
            link.sendall(mutated(generator, message))
            if number % 2:
                link.shutdown(socket.SHUT_WR)
                link.recv(100)
    assert client.put("beat.0", 7) and client.get("beat.0") == 7
    assert threading.active_count() < threads + 300
    assert capfd.readouterr().err == ""
