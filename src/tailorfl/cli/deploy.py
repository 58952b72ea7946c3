"""The commands of a real federation: `tailorfl server`, `tailorfl client` and `tailorfl deploy`."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from tailorfl.cli.arguments import Imports, Quiet, experiment, given
from tailorfl.cli.screen import remark, say, stderr, stdout
from tailorfl.cli.state import State, quoted
from tailorfl.errors import ConfigError

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
    imports: Imports = None,
    quiet: Quiet = False,
) -> None:
    """Run an experiment with clients on other machines, each started by `tailorfl client`."""
    _check_keys(keys, insecure)
    from tailorfl.cli.running import show_result
    from tailorfl.deploy.flower.processes import check_installed
    from tailorfl.deploy.running import run_server
    from tailorfl.experiments.check import check
    from tailorfl.experiments.progress import messages, observer

    check_installed()
    with messages(stderr()):
        config = experiment(arguments)
    check(config)
    folder = out if out is not None else Path("runs") / config.name
    how = "--insecure" if keys is None else f"--keys {quoted(keys)}"
    again = f"tailorfl server {shlex.join(arguments or ())} --listen {listen} {how} --out {quoted(folder)}"
    ctx.ensure_object(State).under_way(folder / "config.yaml", again)
    with observer(stderr(), config, quiet=quiet) as watch:
        result = run_server(config, folder, listen, keys, told=_told("server"), observer=watch)
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
    max_bytes: Annotated[
        int, typer.Option(metavar="BYTES", min=1024, help="A message of the server with more is refused.")
    ] = 2**30,
    stay: Annotated[
        bool, typer.Option("--stay", help="Wait for further experiments when one is over.")
    ] = False,
    imports: Imports = None,
) -> None:
    """Take part in a federation with your own samples, which stay on this machine."""
    _check_keys(keys, insecure)
    from tailorfl.deploy.flower.processes import check_installed
    from tailorfl.deploy.joining import member_of
    from tailorfl.deploy.running import run_client

    check_installed()
    told = _told(name or (data.stem if data is not None else "client"))
    member = member_of(state=state, data=data, name=name, largest=max_bytes, told=told)
    told(f"connects to {server}; private states are kept in '{state}'")
    run_client(member, server, keys, state, told=told, stay=stay)


@app.command("keys")
def keys_command(
    folder: Annotated[Path, typer.Argument(help="Where to.")],
    clients: Annotated[str, typer.Option(help="Names of clients, with commas between them.")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="Name or address by which clients reach the server; may be repeated."),
    ] = None,
    days: Annotated[int, typer.Option(help="How long certificates hold.", min=1)] = 365,
) -> None:
    """Make keys and certificates for a federation, or for further clients of one."""
    from tailorfl.deploy.keys import make_keys

    names = [name.strip() for name in clients.split(",") if name.strip()]
    make_keys(folder, host or (), names, days)
    console = stdout()
    say(console, f"for the server's machine:   {folder / 'server'}")
    for name in names:
        say(console, f"for the machine of {name}: {folder / 'clients' / name}")
    say(console, f"keep elsewhere:             {folder / 'authority.key'}")


@app.command("init")
def init_command(
    experiment_file: Annotated[Path, typer.Argument(metavar="EXPERIMENT", help="A YAML file.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the app.")] = Path("federation"),
) -> None:
    """Write a Flower app of an experiment, for those who run Flower themselves (flwr run)."""
    from tailorfl.deploy.flower.app_folder import write_app
    from tailorfl.deploy.serving import for_deployment
    from tailorfl.experiments.config import load

    for_deployment(load(experiment_file))
    if (out / "pyproject.toml").exists():
        raise ConfigError(f"'{out}' has a pyproject.toml already; choose another folder (-o)")
    write_app(out, {"experiment": str(experiment_file.resolve()), "out": "", "socket": ""})
    console = stdout()
    say(console, f"{out} is a Flower app. Run it on a SuperLink of yours by")
    say(console, f"  flwr run {out} NAME -c 'out=\"RESULT FOLDER\"' --stream")
    say(console, "with SuperNodes that are told where their data lie:")
    say(console, '  flower-supernode ... --node-config \'data="FILE" state="FOLDER" name="CLIENT"\'')


def _told(who: str) -> Callable[[str], None]:
    def tell(sentence: str) -> None:
        stderr().print(remark(f"{who}:", sentence, "bold"), soft_wrap=True)

    return tell
