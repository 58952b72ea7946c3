"""The commands of a real federation: `tailorfl server`, `tailorfl client` and `tailorfl deploy`.

Server and client log to stderr while they run: lines with time and level, or JSON.
"""

from __future__ import annotations

import datetime
import json
import logging
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tailorfl.cli.arguments import Arguments, Imports, Quiet, State, documented, experiment, import_options
from tailorfl.cli.screen import make_table, say, show_table, stdout
from tailorfl.errors import ConfigError
from tailorfl.printable import quoted, visible
from tailorfl.runs.process import import_pandas, import_tensordict
from tailorfl.settings.names import slug

app = typer.Typer(
    no_args_is_help=True,
    help="Prepare a federation of real machines, see also server and client.",
)
Keys = Annotated[
    Path | None,
    typer.Option(metavar="KEYS", help="Folder of keys for this side, as `tailorfl deploy keys` writes it."),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure",
        help="No keys: nothing is encrypted and anybody may join. Only for trials on one machine.",
    ),
]
Health = Annotated[
    int | None,
    typer.Option(
        metavar="PORT", min=1, max=65535, help="Answer /healthz and /metrics at this port of 127.0.0.1."
    ),
]


class LogFormat(StrEnum):
    """The format of a log line."""

    text = "text"
    json = "json"


class LogLevel(StrEnum):
    """The lowest level that is logged."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


Format = Annotated[
    LogFormat, typer.Option("--log-format", help="Lines of text, or one JSON object per line.")
]
Level = Annotated[LogLevel, typer.Option("--log-level", help="Least severe level to log.")]


class _Stamped(logging.Handler):
    """Writes a record as one line: `TIME LEVEL WHO: TEXT`, or an object with these four."""

    def __init__(self, form: LogFormat, name: str) -> None:
        super().__init__()
        self._form, self._name = form, name

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(
            timespec="milliseconds"
        )
        level, text = record.levelname.lower(), visible(self.format(record), but="\n\t")
        if self._form is LogFormat.json:
            line = json.dumps(
                {"time": moment, "level": level, "who": self._name, "message": text}, ensure_ascii=False
            )
        else:
            # words of the other side must not look like a line of their own
            line = f"{moment} {level} {self._name}: {text}".replace("\n", "\n  ")
        print(line, file=sys.stderr, flush=True)


@contextmanager
def service_log(name: str, form: LogFormat, level: LogLevel) -> Iterator[Callable[[str], None]]:
    """Write the library's log within the block; yield a function that logs a sentence for the operator."""
    from tailorfl.report.progress import messages

    log = logging.getLogger("tailorfl")
    before = log.level
    log.setLevel(level.upper())
    try:
        with messages(_Stamped(form, name)):
            yield log.getChild("deploy").info
    finally:
        log.setLevel(before)


def _check_keys(keys: Path | None, insecure: bool) -> None:
    if (keys is None) != insecure:
        problem = "are given together" if insecure else "is missing"
        raise ConfigError(
            f"one of --keys KEYS and --insecure {problem}: keys are made by tailorfl deploy keys, and without them "
            "nothing is encrypted and anybody may join"
        )


def server(
    ctx: typer.Context,
    arguments: Arguments = None,
    listen: str = "127.0.0.1:8000",
    out: Path | None = None,
    keys: Keys = None,
    insecure: Insecure = False,
    anywhere: bool = False,
    imports: Imports = None,
    quiet: Quiet = False,
    health: Health = None,
    log_format: Format = LogFormat.text,
    log_level: Level = LogLevel.info,
) -> None:
    """Run an experiment with clients on other machines, each started by `tailorfl client`.

    Args:
        arguments: An experiment as for `tailorfl run`; its clients are those that connect.
        listen (HOST:PORT): Where clients connect.
        out (RESULTS): Result folder; an experiment in it is continued. By default runs/NAME.
        anywhere: With --insecure: listen beyond this machine as well.
    """
    _check_keys(keys, insecure)
    import_tensordict()
    from tailorfl.cli.results import show_result
    from tailorfl.deploy.running import run_server
    from tailorfl.report.progress import ProgressLines
    from tailorfl.runs.build import check
    from tailorfl.runs.folders import ROOT
    from tailorfl.runs.job import Observer

    state = ctx.ensure_object(State)
    with service_log("server", log_format, log_level) as log:
        config = experiment(arguments)
        check(config)
        folder = ROOT / slug(config.name) if out is None else out
        security = "--insecure" if keys is None else f"--keys {quoted(keys)}"
        words = " ".join(map(shlex.quote, (*(arguments or ()), "--listen", listen, "--out", str(folder))))
        words += f" {security}{' --anywhere' * anywhere}{'' if health is None else f' --health {health}'}"
        state.under_way(folder / "config.yaml", f"tailorfl server{import_options()} {words}")
        watch = Observer() if quiet else ProgressLines(log)
        result = run_server(
            config, folder, listen, keys, notify=log, observer=watch, anywhere=anywhere, health=health
        )
    state.done()
    show_result(result)


def client(
    server: Annotated[str, typer.Option()],
    state: Annotated[Path, typer.Option()],
    data: Path | None = None,
    name: str | None = None,
    keys: Keys = None,
    insecure: Insecure = False,
    policy: Path | None = None,
    experiment_file: Path | None = None,
    accept: list[str] | None = None,
    stay: bool = False,
    leave: bool = False,
    imports: Imports = None,
    health: Health = None,
    log_format: Format = LogFormat.text,
    log_level: Level = LogLevel.info,
) -> None:
    """Take part in a federation with your own samples, which stay on this machine.

    Args:
        server (HOST:PORT): Where the server listens.
        state (STATE): Folder where this client's private states and model are kept.
        data (DATA): A table or a folder of images; by default the client's share of the experiment's data.
        name (NAME): The client's name; by default that of its file, without the ending.
        policy (FILE): Limits of what a server may ask, as `tailorfl deploy policy` writes them.
        experiment_file (--experiment, FILE): The only experiment in which it takes part.
        accept (DIGEST): An experiment in which it takes part; may be repeated.
        stay: Wait for further experiments when one is over.
        leave: Tell the server that this client leaves for good, and end.
    """
    _check_keys(keys, insecure)
    import_tensordict()
    if data is None or data.suffix.lower() != ".parquet":
        import_pandas()
    from tailorfl.deploy.client_session import member_of
    from tailorfl.deploy.policy import DEFAULT_POLICY, Policy
    from tailorfl.deploy.running import run_client
    from tailorfl.settings.loading import load

    with service_log(name or (data.stem if data is not None else "client"), log_format, log_level) as log:
        member = member_of(
            state=state,
            data=data,
            name=name,
            notify=log,
            policy=DEFAULT_POLICY if policy is None else Policy.read(policy),
            experiment=None if experiment_file is None else load(experiment_file),
            accept=tuple(accept or ()),
        )
        member.leaves = leave
        log(f"connects to {server}; private states are kept in '{state}'")
        run_client(member, server, keys, notify=log, stay=stay, health=health)


@app.command("leave")
@documented
def leave_command(results: Path, client: str) -> None:
    """Remove a client from a federation for good: even a running server no longer waits for it.

    Args:
        results (RESULTS): The server's result folder.
        client (NAME): The client's name.
    """
    from tailorfl.deploy.membership import take_off

    take_off(results, client)
    say(stdout(), f"from the next round on, the server neither asks '{client}' nor waits for it")


@app.command("join")
@documented
def join_command(results: Path, client: str) -> None:
    """Let a client join a federation that has begun: even a running server admits it when it connects.

    Args:
        results (RESULTS): The server's result folder.
        client (NAME): The client's name, as in its certificate.
    """
    from tailorfl.deploy.membership import let_in

    let_in(results, client)
    say(stdout(), f"once connected, '{client}' takes part from the next round on")


@app.command("keys")
@documented
def keys_command(
    folder: Path,
    clients: str = "",
    host: list[str] | None = None,
    days: Annotated[int, typer.Option(min=1, max=36_500)] = 365,
    renew: str | None = None,
    revoke: str | None = None,
) -> None:
    """Make keys and certificates for a federation, or for further clients of one; renew or revoke one.

    Args:
        folder (KEYS): The folder to write.
        clients (NAME,...): Names of clients, separated by commas.
        host (HOST): Name or address by which clients reach the server; may be repeated.
        days: Days for which certificates are valid.
        renew (NAME): Make a new key for one client and revoke its old one, or for the `server`.
        revoke (NAME): Revoke a client's certificate, so that the server rejects it.
    """
    from tailorfl.deploy import keys

    names = [name.strip() for name in clients.split(",") if name.strip()]
    if names and (renew is not None or revoke is not None):
        raise ConfigError(
            "--clients makes keys for further clients, and --renew and --revoke change one that has a key; run one "
            "command after the other"
        )
    lines = []
    if revoke is not None:
        keys.revoke(folder, revoke)
        revoked = folder / "server" / keys.REVOKED
        lines.append(f"copy to the server's machine, which reads it while it runs: {revoked}")
    if renew is not None:
        keys.renew(folder, renew, host or (), days)
        names.append(renew)
    elif revoke is None:
        keys.make_keys(folder, host or (), names, days)
    if renew is not None or revoke is None:
        lines.append(f"for the server's machine:   {folder / 'server'}")
        lines += [f"for the machine of {name}: {folder / 'clients' / slug(name)}" for name in names]
        lines.append(f"keep elsewhere:             {folder / keys.ROOT_KEY}")
    say(stdout(), "\n".join(lines))


@app.command("policy")
@documented
def policy_command(
    experiment_file: Annotated[Path | None, typer.Argument()] = None, out: Path = Path("policy.yaml")
) -> None:
    """Write a policy: limits of what a server may ask of a client.

    Args:
        experiment_file ([FILE]): An experiment as a YAML file; the policy allows what it needs.
        out (FILE): The file to write.
    """
    from tailorfl.deploy.policy import experiment_digest, template
    from tailorfl.runs.files import write_text
    from tailorfl.settings.loading import load

    config = None if experiment_file is None else load(experiment_file)
    if out.exists():
        raise ConfigError(f"'{out}' exists already; choose another file (-o)")
    write_text(out, template(config))
    say(stdout(), f"{out} sets what a client allows: tailorfl client ... --policy {quoted(out)}")
    if config is not None:
        say(stdout(), f"the experiment's digest: {experiment_digest(config)}")


@app.command("audit")
@documented
def audit_command(state: Path) -> None:
    """Print what has left a client, and check that no line of its log was changed or removed.

    Args:
        state (STATE): The state folder of a client.
    """
    from tailorfl.deploy.release_log import HEADS, NAME, table_rows, verified

    if not (state / NAME).is_file():
        raise ConfigError(f"'{state}' has no {NAME}; give the --state folder of a client")
    lines = verified(state)
    left = ("time (UTC)", "experiment", "kind")
    show_table(stdout(), make_table(None, HEADS, table_rows(lines), left=left, prose=("what",)))
    say(stdout(), f"{len(lines)} lines, all unchanged")
