"""Keys and certificates: for whom they are, further ones, one renewed alone, one revoked."""

from __future__ import annotations

import os
import shutil
import ssl
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography")
from cryptography import x509

from cli.commands import invoke
from tailorfl.deploy.keys import Revoked, client_keys, make_keys, renew, revoke, server_keys
from tailorfl.errors import ConfigError


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path, ["server.example.org", "10.0.0.7"], ["north", "south"])
    return tmp_path


def certificate(path: Path) -> Any:
    """The certificate in a file."""
    return x509.load_pem_x509_certificate(path.read_bytes())


def everything(folder: Path) -> dict[str, bytes]:
    """All files."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def hosts(data: bytes) -> set[str]:
    """For which machines a certificate is."""
    extensions = x509.load_pem_x509_certificate(data).extensions
    return {str(name.value) for name in extensions.get_extension_for_class(x509.SubjectAlternativeName).value}


def test_who_has_what(keys: Path) -> None:
    assert set(everything(keys)) == {
        "authority.key",
        *(f"server/{name}" for name in ("authority.crt", "server.crt", "server.key")),
        *(f"clients/north/{name}" for name in ("authority.crt", "client.crt", "client.key")),
        *(f"clients/south/{name}" for name in ("authority.crt", "client.crt", "client.key")),
    }
    private = [*keys.rglob("*.key"), keys / "server", keys / "clients", keys / "clients" / "north"]
    assert {path.stat().st_mode & 0o077 for path in private} == {0}
    assert client_keys(keys / "clients" / "north").holder() == "north"
    server = keys / "server" / "server.crt"
    assert hosts(server.read_bytes()) == {"server.example.org", "10.0.0.7", "localhost", "127.0.0.1"}
    authority = certificate(keys / "server" / "authority.crt")
    for path in (server, keys / "clients" / "north" / "client.crt"):
        certificate(path).verify_directly_issued_by(authority)
    assert server_keys(keys).for_server().verify_mode == ssl.CERT_REQUIRED


def test_a_further_client_changes_nothing_of_others(keys: Path) -> None:
    before = everything(keys)
    make_keys(keys, [], ["east"])
    after = everything(keys)
    assert {name: after[name] for name in before} == before
    with pytest.raises(ConfigError, match=r"'north' already has a key .* --renew north"):
        make_keys(keys, [], ["north"])


def test_a_key_that_a_crash_left_unfinished_is_made_again(keys: Path) -> None:
    (keys / "clients" / "north" / "client.crt").unlink()
    make_keys(keys, [], ["north"])
    assert client_keys(keys / "clients" / "north").holder() == "north"


@pytest.mark.parametrize(
    "words",
    [
        ("--renew", "north", "--clients", "east"),
        ("--revoke", "north", "--clients", "east"),
        ("--host", "new.example.org", "--clients", "east"),
    ],
)
def test_options_that_would_have_no_effect_are_refused(keys: Path, words: tuple[str, ...]) -> None:
    before = everything(keys)
    invoke("deploy", "keys", keys, *words, code=2)
    assert everything(keys) == before


def test_an_authority_is_never_made_anew(keys: Path) -> None:
    """Whether the server's folder was moved to its machine, or a crash came before it was complete."""
    before = everything(keys)
    (keys / "server").rename(keys / "moved")
    with pytest.raises(ConfigError, match=r"authority\.crt"):
        make_keys(keys, ["server.example.org"], ["east"])
    assert (keys / "authority.key").read_bytes() == before["authority.key"]
    (keys / "moved").rename(keys / "server")
    for name in ("server.crt", "server.key"):
        (keys / "server" / name).unlink()
    make_keys(keys, ["server.example.org"], ["east"])
    for name in ("authority.key", "server/authority.crt"):
        assert (keys / name).read_bytes() == before[name]


def test_one_is_renewed_alone(keys: Path) -> None:
    before, old = everything(keys), certificate(keys / "clients" / "north" / "client.crt")
    renew(keys, "north")
    after = everything(keys)
    changed = {name for name in after if before.get(name) != after[name]}
    assert changed == {"clients/north/client.crt", "clients/north/client.key", "server/revoked"}
    listed = Revoked(keys / "server")
    new = certificate(keys / "clients" / "north" / "client.crt")
    assert listed.why("north", f"{new.serial_number:X}") == ""
    assert "'north' is revoked" in listed.why("north", f"0{old.serial_number:x}")
    renew(keys, "server")
    changed = {name for name, held in everything(keys).items() if after[name] != held}
    assert changed == {"server/server.crt", "server/server.key"}
    assert hosts((keys / "server" / "server.crt").read_bytes()) == hosts(before["server/server.crt"])


def test_the_list_of_the_revoked_is_read_again(keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    listed, path = Revoked(keys), keys / "server" / "revoked"
    serial = f"{certificate(keys / 'clients' / 'south' / 'client.crt').serial_number:X}"
    assert listed.why("south", serial) == ""
    revoke(keys, "south")
    assert "'south'" in listed.why("south", serial)
    path.write_text("\nnorth wing\n")
    os.utime(path, (1, 1))
    assert listed.why("south", serial) == ""
    assert "'north wing'" in listed.why("north wing", "77")
    assert listed.why("NORTH", "77") == ""  # the first word of a line is a number, and no name
    path.write_bytes("north wing".encode("utf-16"))  # as some editors do
    for _ in range(2):
        with pytest.raises(ValueError, match="utf"):
            listed.why("south", serial)
    assert [str(path) in said for said in caplog.messages] == [True]
    path.write_text("north wing", encoding="utf-8-sig")  # by hand, without a line end
    assert "'north wing'" in listed.why("north wing", "77")
    revoke(keys, "south")
    assert listed.why("south", serial)
    assert listed.why("north wing", "77")
    path.unlink()
    assert listed.why("north wing", "77") == ""


def test_what_cannot_be_used(keys: Path) -> None:
    for use, words in (
        (lambda: client_keys(keys / "server"), r"no client\.crt"),
        (lambda: revoke(keys, "west"), r"no client\.crt"),
        (lambda: renew(keys / "elsewhere", "server"), r"no .*server\.crt"),
        (lambda: make_keys(keys, [], ["x" * 65]), "65"),
        (lambda: make_keys(keys, [], ["é" * 33]), "66"),
        (lambda: make_keys(keys, [], [""]), "has 0"),
        (lambda: make_keys(keys / "new", ["käse.example"], []), "'käse.example'"),
        (lambda: renew(keys, "server", [""]), "''"),
    ):
        with pytest.raises(ConfigError, match=words):
            use()
    make_keys(keys, [], ["long"], days=9999)
    ends = [
        certificate(keys / at).not_valid_after_utc
        for at in ("clients/long/client.crt", "server/authority.crt")
    ]
    assert ends[0] == ends[1]
    with pytest.raises(ConfigError, match="authority's certificate in"):
        make_keys(keys / "over", ["localhost"], [], days=-1)
    make_keys(keys, [], ["old"], days=0)
    with pytest.raises(ConfigError, match="expired"):
        client_keys(keys / "clients" / "old")
    (keys / "authority.key").rename(keys / "elsewhere")
    before = everything(keys)
    for use in (lambda: make_keys(keys, [], ["east"]), lambda: renew(keys, "north")):
        with pytest.raises(ConfigError, match=r"authority.key'"):
            use()
    assert everything(keys) == before, "the certificate is revoked, and there is no new one"
    assert not (keys / "new").exists()
    shutil.copy(keys / "clients" / "south" / "client.key", keys / "clients" / "north" / "client.key")
    with pytest.raises(ConfigError, match=r"client.crt' and .*client.key' cannot be used"):
        client_keys(keys / "clients" / "north").for_client()
    (keys / "clients" / "south" / "client.crt").write_text("nothing")
    with pytest.raises(ConfigError, match="not a certificate"):
        client_keys(keys / "clients" / "south")
