"""One start of a job on hosts that are reached by ssh, and why it has ended."""

from collections.abc import Callable, Mapping, Sequence

from keras_dist.launch import agent
from keras_dist.launch.failures import print_message
from keras_dist.launch.remote_hosts import RemoteHosts
from keras_dist.launch.reports import (
    are_asked,
    blamed,
    lost_text,
    ranks_in_words,
    verdict,
)
from keras_dist.launch.restarts import Outcome
from keras_dist.launch.signals import SAVED, is_saving


def run_on_hosts(
    remote: RemoteHosts, stopped: list[int], change: Callable[[], str]
) -> Outcome:
    """Start the agents of all hosts, and wait for their end.

    Args:
        remote: The agents.
        stopped: Numbers of the signals that have stopped the job.
        change: Returns why the ranks should save and end, or an empty text.
    """
    codes: dict[str, int] = {}
    why = ""
    try:
        remote.start()
        why = remote.wait(stopped, change)
    finally:
        codes = remote.end(is_saving=bool(why) or is_saving(stopped))
    reports = agent.read_reports(remote.store, len(remote.hosts))
    has_all = len(reports) == len(remote.hosts)
    if stopped or not (codes or why):
        return Outcome(0, has_saved=has_all and all(r.saved for r in reports.values()))
    if why and has_all and are_asked(reports.values()):
        is_over = all(report.finished for report in reports.values())
        return Outcome(0 if is_over else SAVED, is_change=True, why=why)
    silent = [number for number in range(len(remote.hosts)) if number not in reports]
    to_blame = _host_to_blame(remote, silent, codes)
    cause = (to_blame[1], to_blame[2]) if to_blame else None
    hosts = {r: h for n, h in enumerate(remote.hosts) for r in remote.ranks_of(n)}
    unknown = [rank for number in silent for rank in remote.ranks_of(number)]
    text, code = verdict(list(reports.values()), cause, hosts=hosts, unknown=unknown)
    print_message(text)
    lost = [remote.hosts[number] for number in silent] if to_blame else []
    by_host = (to_blame[0], f"host {to_blame[0]} was lost") if to_blame else ("", "")
    failed, why = blamed(reports.values(), hosts) or by_host
    return Outcome(code, lost, failed=failed, why=why)


def _host_to_blame(
    remote: RemoteHosts, silent: Sequence[int], codes: Mapping[str, int]
) -> tuple[str, str, int] | None:
    """A host that has sent no report, what happened there, and the job's exit code."""
    failed = [number for number in silent if remote.hosts[number] in codes]
    if not failed:
        return None
    number = next(iter(remote.lost), failed[0])
    host, ranks = remote.hosts[number], remote.ranks_of(number)
    named = ranks_in_words(ranks)
    if number in remote.lost:
        return host, lost_text(host, ranks), 1
    code = codes[host] if codes[host] > 0 else 128 - codes[host]
    if not remote.has_run(number):
        return host, f"no ranks could be run on {host}: exit code {code}.", code
    return (
        host,
        f"the agent on {host} was killed, or the connection to it was lost, while "
        f"{named} ran: exit code {code}.",
        code,
    )
