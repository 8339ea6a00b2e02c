"""Random messages neither end nor confuse the store, the launcher or an agent."""

import io
import json
import random
import socket
import threading

import pytest

from keras_dist.launch import agent
from keras_dist.launch.failures import Failure, Report, verdict
from keras_dist.launch.hosts import Meeting, slots
from keras_dist.launch.job import Job, Presence
from keras_dist.launch.ranks import Command
from keras_dist.launch.store import (
    Store,
    StoreClient,
    client_of,
    store_token,
    variables_of,
)

MESSAGES = 10_000
SECRET = "the secret of the job"
HOSTS = [("a", 2), ("b", 1)]

_VALUES = [None, True, -1, 1e308, "", "x", [], [[]], {}, {"rank": 0}, "\0", "ü" * 9]


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


def altered(generator, value):
    """A JSON value in which one of the values inside is another one, or is missing."""
    if not isinstance(value, (dict, list)) or not value or generator.random() < 0.2:
        return generator.choice(_VALUES)
    copy = value.copy()
    key = generator.choice(list(copy) if isinstance(copy, dict) else range(len(copy)))
    if generator.random() < 0.2:
        del copy[key]
    else:
        copy[key] = altered(generator, copy[key])
    return copy


@pytest.fixture
def store():
    """A store with values, and the variables by which ranks find it."""
    store = Store()
    store.open(slots(HOSTS), SECRET)
    yield store, variables_of("127.0.0.1", store.port, SECRET)
    store.close()


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
    ranks = client_of(variables)
    assert ranks.put("beat.0", 1) and ranks.put("host.1", {"saved": True})
    before = {name: dict(scope) for name, scope in own._server.cache.items()}
    tokens = [
        "",
        "0" * 32,
        SECRET,
        store_token(SECRET)[:31],
        store_token("another"),
        "ü",
    ]
    accepted = []
    for _ in range(MESSAGES):
        method = generator.choice(["GET", "PUT", "DELETE", "HEAD", "POST", "get"])
        path = f"/{generator.choice(tokens)}:{own.port}/keras_dist_watch/beat.0"
        message = mutated(generator, request(method, path, b'{"saved": true}'))
        if generator.random() < 0.1:
            message = generator.randbytes(generator.randint(0, 300))
        status = answer_of(own._server, message).split(b"\r\n")[0].split(b" ")[1:2]
        accepted += [message] if status == [b"200"] else []
    assert accepted == []
    assert {name: dict(scope) for name, scope in own._server.cache.items()} == before
    assert ranks.get("beat.0") == 1
    assert capfd.readouterr().err == ""


def test_what_a_rank_sends_by_mistake_ends_neither_store_nor_launcher(store, capfd):
    """With the token, over connections of their own; the store answers the next one."""
    generator = random.Random(18)
    own, variables = store
    ranks, threads = client_of(variables), threading.active_count()
    path = f"/{store_token(SECRET)}:{own.port}/keras_dist_watch/"
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


def test_a_value_is_taken_whole_or_not_at_all(store):
    """Lengths that are none, too large, or more than what comes."""
    own, variables = store
    ranks = client_of(variables)
    ranks.put("beat.0", 1)
    path = f"/{store_token(SECRET)}:{own.port}/keras_dist_watch/beat.0"
    for length in ("", "x", "-1", "1e3", "99", "9" * 5000, "999999999"):
        message = f"PUT {path} HTTP/1.1\r\nContent-Length: {length}\r\n\r\n22"
        answer = answer_of(own._server, message.encode())
        assert b" 40" in answer.split(b"\r\n")[0], (length, answer)
    assert ranks.get("beat.0") == 1


class Values(StoreClient):
    """A store that answers with what it is given."""

    def __init__(self, values):
        super().__init__("127.0.0.1", 1)
        self.texts = {name: json.dumps(value).encode() for name, value in values}

    def _request(self, method, name, body=None):
        if name.endswith("*"):
            found = {n: t.decode("latin-1") for n, t in self.texts.items()}
            return json.dumps(found).encode()
        return self.texts.get(name)


def test_a_report_that_is_none_counts_as_not_sent(store):
    """The launcher reads reports and heartbeats, and what it reads makes a message."""
    generator = random.Random(19)
    failure = Failure(2, 1.5, 3, "KeyError: 'tea'", "Traceback", is_secondary=False)
    whole = json.loads(json.dumps(Report([failure], {2: "in step 1"}).values()))
    job, hosts = Job(Meeting(), store[0], SECRET, []), dict(enumerate("aab"))
    presence, is_read = Presence(Values([])), 0
    for _ in range(MESSAGES):
        job.values.put("report.0.b", altered(generator, whole))
        reports = job._new_reports(["b"], 0)
        assert all(isinstance(report, Report) for report in reports.values())
        text, code = verdict(list(reports.values()), None, hosts=hosts, unknown=[])
        is_read += code != 1
        assert text.startswith("keras-dist: ")
        beat = generator.choice([*_VALUES, 5])
        presence._store, presence._looked = Values([("beat.1", beat)]), 0.0
        presence.look(["0", "1"])
        presence.lost(["0", "1"])
    job.values.put("report.0.b", whole)
    assert job._new_reports(["b"], 0)["b"].failures == [failure]
    assert 0 < is_read < MESSAGES


def test_an_agent_takes_a_whole_header_alone():
    """All else is an error that says what an agent is for, before anything starts."""
    generator = random.Random(20)
    command = Command(kind="script", words=["a.py"], environment={"A": "b"})
    header = agent.Header(
        address="127.0.0.1",
        port=1,
        secret="secret",
        name="1_0",
        host="a",
        number=0,
        num_ranks=1,
        num_hosts=2,
        job="1",
        folder="/",
        command=command,
    )
    line = header.line()
    assert agent.header_of(line) == header
    refused = 0
    for number in range(MESSAGES):
        if number % 2:
            message = mutated(generator, line)
        else:
            message = json.dumps(altered(generator, json.loads(line))).encode()
        try:
            agent.header_of(message)
        except ValueError as error:
            refused += 1
            assert "started by `keras-dist run -H`" in str(error)
    assert refused > MESSAGES / 2


def test_an_agent_goes_on_until_the_connection_ends():
    """Random lines behind the header are none of the launcher's."""
    generator = random.Random(21)
    texts = [generator.randbytes(generator.randint(0, 40)) for _ in range(MESSAGES)]
    lines = io.BytesIO(b"\n".join(text.replace(b"\n", b"") for text in texts))
    cuts = []
    agent._wait_for_end(lines, lambda: cuts.append(lines.read()))
    assert cuts == [b""]
