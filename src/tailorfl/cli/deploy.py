"""The commands of a real federation: `tailorfl server`, `tailorfl client` and `tailorfl deploy`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from tailorfl.cli.arguments import Imports, Quiet, experiment, given
from tailorfl.cli.screen import say, stdout
from tailorfl.cli.service_log import Format, Level, LogFormat, LogLevel, service_log
from tailorfl.cli.state import State
from tailorfl.errors import ConfigError
from tailorfl.light_imports import import_pandas, import_tensordict
from tailorfl.printable import quoted
from tailorfl.settings.names import slug

app = typer.Typer(
    name="deploy",
    no_args_is_help=True,
    help="Prepare a federation of real machines, see also server and client.",
)
Keys = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Keys as `tailorfl deploy keys` writes them, for this side."),
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure", help="No keys: nothing is encrypted and anybody may join. To try it on one machine."
    ),
]
Health = Annotated[
    int | None,
    typer.Option(
        metavar="PORT", min=1, max=65535, help="Answer /healthz and /metrics at this port of 127.0.0.1."
    ),
]


def _check_keys(keys: Path | None, insecure: bool) -> None:
    if (keys is None) != insecure:
        said = "are given together" if insecure else "is missing"
        raise ConfigError(
            f"one of --keys FOLDER and --insecure {said}: keys are made by tailorfl deploy keys, and without them "
            "nothing is encrypted and anybody may join"
        )


def server(
    ctx: typer.Context,
    arguments: Annotated[
        list[str] | None, given("An experiment as for `tailorfl run`; its clients are those that connect.")
    ] = None,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where clients connect.")
    ] = "127.0.0.1:8000",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Result folder; what is there of the experiment is gone on with. By default runs/NAME."
        ),
    ] = None,
    keys: Keys = None,
    insecure: Insecure = False,
    anywhere: Annotated[
        bool, typer.Option("--anywhere", help="With --insecure: listen beyond this machine as well.")
    ] = False,
    imports: Imports = None,
    quiet: Quiet = False,
    health: Health = None,
    log_format: Format = LogFormat.text,
    log_level: Level = LogLevel.info,
) -> None:
    """Run an experiment with clients on other machines, each started by `tailorfl client`."""
    _check_keys(keys, insecure)
    import_tensordict()
    from tailorfl.cli.running import show_result
    from tailorfl.deploy.running import run_server
    from tailorfl.report.progress import ProgressLines
    from tailorfl.runs.build import check
    from tailorfl.runs.job import Observer

    with service_log("server", log_format, log_level) as told:
        config = experiment(arguments)
        check(config)
        folder = out if out is not None else Path("runs") / config.name
        how = "--insecure" if keys is None else f"--keys {quoted(keys)}"
        again = (
            f"tailorfl server {shlex.join(arguments or ())} --listen {listen} {how} --out {quoted(folder)}"
        )
        ctx.ensure_object(State).under_way(folder / "config.yaml", again)
        watch = Observer() if quiet else ProgressLines(told)
        result = run_server(
            config, folder, listen, keys, told=told, observer=watch, anywhere=anywhere, health=health
        )
    ctx.ensure_object(State).done()
    show_result(result)


def client(
    server: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the server listens.")],
    state: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where this client's private states and model are kept.")
    ],
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Its table, or folder of images; without, its share of the experiment's data.",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The client's name; by default that of its file, without the ending.")
    ] = None,
    keys: Keys = None,
    insecure: Insecure = False,
    policy: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What a server may ask, as `tailorfl deploy policy` writes it."),
    ] = None,
    experiment_file: Annotated[
        Path | None,
        typer.Option("--experiment", metavar="FILE", help="The only experiment that it takes part in."),
    ] = None,
    accept: Annotated[
        list[str] | None,
        typer.Option(metavar="DIGEST", help="An experiment that it takes part in; may be repeated."),
    ] = None,
    stay: Annotated[
        bool, typer.Option("--stay", help="Wait for further experiments when one is over.")
    ] = False,
    leave: Annotated[
        bool, typer.Option("--leave", help="Tell the server that this client leaves for good, and end.")
    ] = False,
    imports: Imports = None,
    health: Health = None,
    log_format: Format = LogFormat.text,
    log_level: Level = LogLevel.info,
) -> None:
    """Take part in a federation with your own samples, which stay on this machine."""
    _check_keys(keys, insecure)
    import_tensordict()
    if data is None or data.suffix.lower() != ".parquet":
        import_pandas()
    from tailorfl.deploy.client_session import member_of
    from tailorfl.deploy.policy import DEFAULT_POLICY, Policy
    from tailorfl.deploy.running import run_client
    from tailorfl.settings.loading import load

    with service_log(name or (data.stem if data is not None else "client"), log_format, log_level) as told:
        member = member_of(
            state=state,
            data=data,
            name=name,
            told=told,
            policy=DEFAULT_POLICY if policy is None else Policy.read(policy),
            experiment=None if experiment_file is None else load(experiment_file),
            accept=tuple(accept or ()),
        )
        member.leaves = leave
        told(f"connects to {server}; private states are kept in '{state}'")
        run_client(member, server, keys, told=told, stay=stay, health=health)


@app.command("leave")
def leave_command(
    results: Annotated[Path, typer.Argument(metavar="RESULTS", help="The server's result folder.")],
    client: Annotated[str, typer.Argument(help="The client's name.")],
) -> None:
    """Take a client off a federation for good: its server, also one that runs, waits for it no more."""
    from tailorfl.deploy.membership import take_off

    take_off(results, client)
    say(stdout(), f"'{client}' is neither asked nor waited for from the next round on")


@app.command("join")
def join_command(
    results: Annotated[Path, typer.Argument(metavar="RESULTS", help="The server's result folder.")],
    client: Annotated[str, typer.Argument(help="The client's name, as in its certificate.")],
) -> None:
    """Let a client join a federation that has begun: its server, also one that runs, takes it in when it connects."""
    from tailorfl.deploy.membership import let_in

    let_in(results, client)
    say(stdout(), f"'{client}' takes part from the round on that begins after it has connected")


@app.command("keys")
def keys_command(
    folder: Annotated[Path, typer.Argument(help="Where to.")],
    clients: Annotated[str, typer.Option(help="Names of clients, with commas between them.")] = "",
    host: Annotated[
        list[str] | None,
        typer.Option(help="Name or address by which clients reach the server; may be repeated."),
    ] = None,
    days: Annotated[int, typer.Option(help="How long certificates hold.", min=1)] = 365,
    renew: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Make another key for one client and revoke its former one, or for the `server`.",
        ),
    ] = None,
    revoke: Annotated[
        str | None, typer.Option(metavar="NAME", help="Have the server not let a client's certificate in.")
    ] = None,
) -> None:
    """Make keys and certificates for a federation, or for further clients of one; renew or revoke one."""
    from tailorfl.deploy import keys

    names = [name.strip() for name in clients.split(",") if name.strip()]
    console = stdout()
    if revoke is not None:
        keys.revoke(folder, revoke)
        say(
            console,
            f"copy to the server's machine, which reads it while it runs: {folder / 'server' / keys.REVOKED}",
        )
    if renew is not None:
        keys.renew(folder, renew, host or (), days)
        names.append(renew)
    if renew is None and revoke is None:
        keys.make_keys(folder, host or (), names, days)
    if renew is not None or revoke is None:
        say(console, f"for the server's machine:   {folder / 'server'}")
        for name in names:
            say(console, f"for the machine of {name}: {folder / 'clients' / slug(name)}")
        say(console, f"keep elsewhere:             {folder / keys.ROOT_KEY}")


@app.command("policy")
def policy_command(
    experiment_file: Annotated[
        Path | None,
        typer.Argument(metavar="[EXPERIMENT]", help="A YAML file; the policy allows what it needs."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="The file.")] = Path("policy.yaml"),
) -> None:
    """Write a policy: what a client lets a server ask of it."""
    from tailorfl.deploy.policy import experiment_digest, template
    from tailorfl.runs.files import write_text
    from tailorfl.settings.loading import load

    config = None if experiment_file is None else load(experiment_file)
    if out.exists():
        raise ConfigError(f"'{out}' exists already; choose another file (-o)")
    write_text(out, template(config))
    console = stdout()
    say(console, f"{out} says what a client allows: tailorfl client ... --policy {quoted(out)}")
    if config is not None:
        say(console, f"the experiment's digest: {experiment_digest(config)}")


@app.command("audit")
def audit_command(
    state: Annotated[Path, typer.Argument(metavar="STATE", help="The state folder of a client.")],
) -> None:
    """Print what has left a client, and check that no line of its log was changed or taken away."""
    from tailorfl.deploy.release_log import NAME, table, verified

    if not (state / NAME).is_file():
        raise ConfigError(f"'{state}' has no {NAME}; give the --state folder of a client")
    console, lines = stdout(), verified(state)
    for row in table(lines):
        say(console, row)
    say(console, f"{len(lines)} lines, each as it was written")
