"""The processes of a cluster find each other, and that they run the same, before TensorFlow starts.

tf.distribute waits without end and without a word for a process that is not there, and computes
something else, or hangs, where flags differ. So each process listens on its address first, tells
all others what it runs, and hears it from them. Only then does TensorFlow get the address.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from .cluster import Task
from .command_line import BadFlags, RunFailed

_CALL_SECONDS = 5.0
_PAUSE = 0.2
_LONGEST = 1_000_000


def meet(task: Task, facts: Mapping[str, Mapping[str, Any]], timeout: float) -> None:
    """Returns when all processes of the cluster are there and have the same facts.

    Args:
        task: this process.
        facts: what must be the same everywhere: names and values, in groups such as flags.
        timeout: seconds to wait for the others.

    Raises:
        RunFailed: this process cannot listen, or another one did not answer in time.
        BadFlags: another one has other facts; in each process, so that all end.
    """
    own = json.loads(json.dumps({"name": task.name, "facts": facts}))
    host = _Host(task, own)
    try:
        found = _ask_all(task, own, time.monotonic() + timeout, timeout)
        host.wait_until_all_have_asked(timeout)
    finally:
        host.close()
    # All compare with the same one, so that all see a difference if there is any.
    first = task.tasks[0][0]
    for name, theirs in found.items():
        if different := differences(found[first], theirs):
            raise BadFlags(
                f"{name} at {dict(task.tasks)[name]} does not run the same as {first}: "
                f"{', '.join(different)}. All processes must be started alike"
            )


def _ask_all(
    task: Task, own: Mapping[str, Any], deadline: float, timeout: float
) -> dict[str, Mapping[str, Any]]:
    """The facts of all processes, by their names; this one's among them."""
    found = {task.name: own["facts"]}
    waiting = dict(task.others)
    why = dict.fromkeys(waiting, "it was not asked")
    while waiting:
        for name, address in list(waiting.items()):
            try:
                found[name] = _ask(address, name, own)
                del waiting[name]
            except (OSError, ValueError) as error:
                why[name] = str(error)
        if waiting and time.monotonic() > deadline:
            missing = "; ".join(f"{name} at {waiting[name]} ({why[name]})" for name in waiting)
            raise RunFailed(
                f"no answer within {timeout:g} s from {missing}. See that it is started with the "
                "same cluster and can be reached, or give it longer with --cluster_timeout"
            )
        if waiting:
            time.sleep(_PAUSE)
    return found


def _ask(address: str, name: str, own: Mapping[str, Any]) -> Mapping[str, Any]:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host.strip("[]"), int(port)), _CALL_SECONDS) as connection:
        connection.settimeout(_CALL_SECONDS)
        try:
            connection.sendall(json.dumps(own).encode() + b"\n")
            answer = _message(connection)
        except (ValueError, ConnectionError) as error:
            raise ValueError("it is no process of bnzoo-train that starts") from error
    if answer["name"] != name:
        raise ValueError(f"it is not {name}")
    return answer["facts"]


def _message(connection: socket.socket) -> Mapping[str, Any]:
    """The name and the facts of the process at the other end; ValueError if it says others."""
    received = b""
    while not received.endswith(b"\n"):
        piece = connection.recv(65536)
        if not piece or len(received) > _LONGEST:
            raise ValueError("it hung up")
        received += piece
    said = json.loads(received)
    name, facts = (said.get("name"), said.get("facts")) if isinstance(said, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(facts, dict):
        raise ValueError("it says something else")
    return said


class _Host:
    """Listens on this process's address and tells who asks what it runs."""

    def __init__(self, task: Task, own: Mapping[str, Any]) -> None:
        self._own = json.dumps(own).encode() + b"\n"
        self._missing = set(task.others)
        self._all_asked = threading.Event()
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port = int(task.address.rpartition(":")[2])
        try:
            self._socket.bind(("", port))
            self._socket.listen(len(self._missing) + 8)
        except OSError as error:
            self._socket.close()
            raise RunFailed(
                f"{task.name} cannot listen on its address {task.address}: {error.strerror}"
            ) from error
        if not self._missing:
            self._all_asked.set()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # Closed.
                return
            # Whoever else knocks here is of no interest.
            with contextlib.suppress(OSError, ValueError), connection:
                connection.settimeout(_CALL_SECONDS)
                asking = _message(connection)
                connection.sendall(self._own)
                self._missing.discard(asking["name"])
                if not self._missing:
                    self._all_asked.set()

    def wait_until_all_have_asked(self, timeout: float) -> None:
        if not self._all_asked.wait(timeout):
            raise RunFailed(
                f"no call within {timeout:g} s from {', '.join(sorted(self._missing))}: see that "
                "the address of this process can be reached from there"
            )

    def close(self) -> None:
        with contextlib.suppress(OSError):
            # Wakes the thread that waits in accept.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def differences(first: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Of facts, what is not the same, as name (value in the first, value in the other)."""
    found = []
    for group in sorted(first.keys() | other.keys()):
        one, two = first.get(group) or {}, other.get(group) or {}
        found += [
            f"{group} {name} ({one.get(name)} and {two.get(name)})"
            for name in sorted(one.keys() | two.keys())
            if one.get(name) != two.get(name)
        ]
    return found
