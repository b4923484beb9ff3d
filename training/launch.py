"""bnzoo-launch: a cluster of processes on this machine, for trying and for tests.

The exit code, by the first of these that holds:

1. 2 if the launcher's own flags are wrong or the command is not there.
2. 130 after Ctrl-C.
3. After SIGTERM or SIGHUP: that of the leading process (the chief or, without parameter servers,
   worker 0) if it ended by itself, so that the code by which training says "run me again" comes
   through; else 128 + the signal.
4. That of the process whose end ended the cluster: 0 if the leading process was done; 128 + the
   signal for one that was killed.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Sequence

from absl import flags

from .command_line import EXIT_INTERRUPTED, BadFlags, Flag, FlagGroups, run_command
from .local_cluster import KILLED, Addresses, Cluster, addresses

PROGRAM = "bnzoo-launch"
USAGE = """bnzoo-launch [--workers=N] [--ps=N] [flags] -- COMMAND [its flags]

Runs COMMAND as a cluster of processes on this machine. For example:
  bnzoo-launch --workers=2 -- bnzoo-train --strategy=multi_worker --recipe=bn_x5
  bnzoo-launch --workers=2 --ps=1 -- bnzoo-train --strategy=parameter_server --recipe=bn_x5"""

LAUNCH_FLAGS: FlagGroups = {
    "Cluster": (
        Flag("workers", "integer", "Worker processes.", 2),
        Flag(
            "ps",
            "integer",
            "Parameter servers. With any there is a chief too, which the cluster ends with; "
            "without, worker 0 leads.",
            0,
        ),
        Flag(
            "restart",
            "integer",
            "How often, in all, to start again what was killed by a signal or ended with a code of "
            "128 or more: with parameter servers a worker alone, else the cluster as a whole.",
            0,
        ),
        Flag(
            "grace",
            "float",
            "Seconds that processes have to end after SIGTERM; then they are killed.",
            30.0,
        ),
    ),
}

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run() -> None:
    """The command bnzoo-launch."""
    sys.exit(main())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with `argv`, as sys.argv, and returns its exit code."""
    own, command = _split(sys.argv if argv is None else argv)
    codes: list[int] = []

    def launch_it(values: flags.FlagValues, arguments: list[str]) -> None:
        _check(values, arguments, command)
        plan = addresses(values.workers, values.ps)
        codes.append(launch(plan, _found(command), values.restart, values.grace))

    code = run_command(PROGRAM, USAGE, LAUNCH_FLAGS, launch_it, own)
    return codes[0] if codes else code


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """What is before and behind the first `--`."""
    own = list(argv)
    if "--" not in own:
        return own, []
    place = own.index("--")
    return own[:place], own[place + 1 :]


def _check(values: flags.FlagValues, arguments: Sequence[str], command: Sequence[str]) -> None:
    problems = [
        f"--{name} must be a number of at least {least}. Received: --{name}={getattr(values, name)}"
        for name, least in (("workers", 1), ("ps", 0), ("restart", 0), ("grace", 0))
        if not getattr(values, name) >= least
    ]
    if arguments:
        problems.append(f"the command must stand behind --. Received: {' '.join(arguments)}")
    elif not command:
        problems.append("there must be a command behind --, such as `-- bnzoo-train --recipe=...`")
    if problems:
        raise BadFlags(*problems)


def _found(command: Sequence[str]) -> list[str]:
    """`command` with the path of its program, which may also lie beside this Python."""
    beside = os.path.join(os.path.dirname(sys.executable), command[0])
    path = shutil.which(command[0]) or shutil.which(beside)
    if path is None:
        raise BadFlags(f"there is no program to run of the name {command[0]}")
    return [path, *command[1:]]


def launch(plan: Addresses, command: Sequence[str], restarts: int = 0, grace: float = 30.0) -> int:
    """Runs `command` as the cluster `plan`, until it is over, and returns the exit code.

    Nothing of it outlives the call.

    Args:
        plan: where each process listens.
        command: what each runs, with TF_CONFIG in its environment.
        restarts: how often something is started again; see --restart.
        grace: seconds from SIGTERM to SIGKILL.
    """
    told: list[signal.Signals] = []
    before = {
        number: signal.signal(number, lambda number, _: told.append(signal.Signals(number)))
        for number in _ENDING
        # What nohup, or a shell that puts it in the background, has set to be ignored stays so.
        if signal.getsignal(number) != signal.SIG_IGN
    }
    cluster = Cluster(plan, command, grace, told)
    try:
        return _run(cluster, restarts, told)
    finally:
        cluster.kill()
        for number, handler in before.items():
            signal.signal(number, handler)
        for one in plan.held:
            one.close()


def _run(cluster: Cluster, restarts: int, told: Sequence[signal.Signals]) -> int:
    first = cluster.tasks[0]
    with_ps = first[0] == "chief"
    cluster.start(*cluster.tasks)
    while not told:
        for process in cluster.look():
            if process.code == 0 and process.task == first and with_ps:
                cluster.end()
                return 0
            if process.code == 0:
                continue
            _say(process.ended)
            again = process.code >= KILLED and restarts > 0
            workers_left = any(job == "worker" for job, _ in cluster.running)
            if with_ps and process.task[0] == "worker" and (again or workers_left):
                if again:
                    restarts -= 1
                    cluster.start(process.task)
                _say(f"{process.name} is started again" if again else "the others go on")
                continue
            _say("ending the others")
            cluster.end()
            if told:
                break
            if not again:
                return process.code
            restarts -= 1
            _say("all are started again")
            cluster.start(*cluster.tasks)
            break
        if not cluster.running:
            return 0
    leader = cluster.running.get(first)
    _say(f"{told[0].name}: ending {len(cluster.running)} processes")
    cluster.end()
    if told[0] == signal.SIGINT:
        return EXIT_INTERRUPTED
    return leader.code if leader and not leader.killed else KILLED + told[0]


def _say(text: str) -> None:
    print(f"{PROGRAM}: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    run()
