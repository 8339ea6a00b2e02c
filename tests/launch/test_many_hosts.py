"""What a thousand ranks cost their launcher and its store grows with their number."""

from keras_dist.launch.failures import RankEnd, Report, describe_failure


def test_a_rank_reads_what_all_have_written_by_one_request(client):
    """From the launcher's store; a value that is none is `None`."""
    assert client.get_all("") == {}
    for name in ("beat.0", "beat.1", "1"):
        client.put(name, {"name": name})
    assert client.get_all("beat.") == {n: {"name": n} for n in ("beat.0", "beat.1")}
    client._request("PUT", "broken", b"\xff{")
    assert client.get_all("b")["broken"] is None
    assert client.get_all("nothing") == {}
    assert client.get_all("1") == {"1": {"name": "1"}}


def test_the_outcomes_of_a_thousand_ranks_are_few_lines():
    """The first failure, the lost host, and a line for each of a few ranks."""
    where = "in step 7 of epoch 1"
    ends = [RankEnd(rank, where) for rank in range(992)]
    ends[7] = RankEnd(
        7, where, 3, 1.0, "KeyError: 'tea'", "Traceback …\nKeyError: 'tea'"
    )
    hosts = [(f"h{k}", range(8 * k, 8 * k + 8)) for k in range(125)]
    reports = [Report([ends[rank] for rank in ranks]) for _, ranks in hosts[:-1]]
    text, code = describe_failure([*reports, None], hosts)
    lines = text.splitlines()
    assert code == 3 and lines[:5] == [
        f"keras-dist: rank 7 on h0 failed first, {where}.",
        "Traceback …",
        "KeyError: 'tea'",
        "keras-dist: host h124 has not responded for 15 s (ranks 992 to 999).",
        f"Rank 0 on h0 was {where}: ended with it",
    ]
    assert lines[-1] == "And 975 more ranks." and len(lines) == 21


def test_the_exit_code_is_that_of_the_rank_that_is_named():
    """Also where another rank, which has failed because of it, has ended before."""
    follows = RankEnd(0, "", 1, 1.0, "On rank 1: …", "On rank 1: …", is_secondary=True)
    causes = RankEnd(1, "in step 7", 3, 2.0, "KeyError: 'tea'", "KeyError: 'tea'")
    text, code = describe_failure([Report([follows, causes])], [("a", range(2))])
    assert text.startswith("keras-dist: rank 1 failed first") and code == 3
    leaves = RankEnd(1, "in step 7", 0, 2.0, "ended with no error", "It ended.")
    text, code = describe_failure([Report([follows, leaves])], [("a", range(2))])
    assert text.startswith("keras-dist: rank 1 failed first") and code == 1
