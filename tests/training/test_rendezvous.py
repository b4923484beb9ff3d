"""Processes find each other before TensorFlow starts, or one line says who is missing or other."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from training import rendezvous
from training.cluster import Task
from training.command_line import BadFlags, RunFailed
from training.rendezvous import meet

from .processes import free_addresses

SAME = {"flag": {"seed": 1, "strategy": "multi_worker"}, "version": {"bnzoo": "0.1.0"}}


class Calls:
    """Keeps who has asked whom, and is a clock that stands until those have who must.

    Attributes:
        answered: (who asked, who answered).
        vain: (who asked, who did not answer).
        needed: of `answered`, what the clock waits for; then it is 2 s later.
    """

    def __init__(self, needed: Iterable[tuple[str, str]] = ()) -> None:
        self.answered: set[tuple[str, str]] = set()
        self.vain: set[tuple[str, str]] = set()
        self.needed = set(needed)
        self.sleep = time.sleep
        self._ask = rendezvous._ask

    def ask(self, address: str, name: str, own: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            facts = self._ask(address, name, own)
        except (OSError, ValueError):
            self.vain.add((own["name"], name))
            raise
        self.answered.add((own["name"], name))
        return facts

    def monotonic(self) -> float:
        return 2.0 if self.needed <= self.answered else 0.0


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 50
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def tasks(count: int) -> list[Task]:
    addresses = free_addresses(count)
    return [Task({"worker": addresses}, "worker", index) for index in range(count)]


def outcomes(*calls: Callable[[], None]) -> list[Exception | None]:
    """What each of `calls`, all made at a time, ends with."""
    found: list[Exception | None] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            calls[number]()
        except (BadFlags, RunFailed) as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return found


def test_all_meet_and_leave_their_ports_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """One comes late, and somebody else knocks."""
    found = tasks(3)
    calls = Calls()
    monkeypatch.setattr(rendezvous, "_ask", calls.ask)

    def late() -> None:
        until(lambda: {("worker 0", "worker 2"), ("worker 1", "worker 2")} <= calls.vain)
        host, _, port = found[0].address.partition(":")
        for said in (b"GET / HTTP/1.1\r\n\r\nno JSON\n", b"[]\n", b'{"name": []}\n'):
            with socket.create_connection((host, int(port))) as stranger:
                stranger.sendall(said)
        meet(found[2], SAME, 50)

    assert (
        outcomes(lambda: meet(found[0], SAME, 50), lambda: meet(found[1], SAME, 50), late)
        == [None] * 3
    )
    for task in found:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", int(task.address.partition(":")[2])))


def test_differences_are_named_in_each_process() -> None:
    found = tasks(2)
    other = {"flag": {**SAME["flag"], "seed": 2}, "version": {"bnzoo": "0.2.0"}}
    errors = outcomes(lambda: meet(found[0], SAME, 50), lambda: meet(found[1], other, 50))
    for error in errors:
        assert isinstance(error, BadFlags)
        assert str(error) == (
            f"worker 1 at {found[1].address} does not run the same as worker 0: flag seed (1 and "
            "2), version bnzoo (0.1.0 and 0.2.0). All processes must be started alike"
        )


def test_a_dead_address_is_named_after_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    found = tasks(3)
    # The time begins to pass when the two that are there know each other.
    calls = Calls({("worker 0", "worker 1"), ("worker 1", "worker 0")})
    monkeypatch.setattr(rendezvous, "_ask", calls.ask)
    monkeypatch.setattr(rendezvous, "time", calls)
    errors = outcomes(lambda: meet(found[0], SAME, 1), lambda: meet(found[1], SAME, 1))
    for error in errors:
        assert isinstance(error, RunFailed)
        assert str(error).startswith(
            f"no answer within 1 s from worker 2 at {found[2].address} ([Errno 111] Connection "
            "refused). See that it is started"
        )


def test_an_address_that_another_program_has_is_named() -> None:
    """A server that says nothing, in the place of the other; and in one's own."""
    found = tasks(2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(found[1].address.partition(":")[2])))
        taken.listen()

        def hang_up() -> None:
            while True:
                try:
                    taken.accept()[0].close()
                except OSError:
                    return

        threading.Thread(target=hang_up, daemon=True).start()
        errors = outcomes(lambda: meet(found[0], SAME, 1), lambda: meet(found[1], SAME, 1))
        taken.shutdown(socket.SHUT_RDWR)
    assert "it is no process of bnzoo-train that starts" in str(errors[0])
    assert str(errors[1]) == (
        f"worker 1 cannot listen on its address {found[1].address}: Address already in use"
    )
