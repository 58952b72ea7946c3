"""Keys and certificates of a federation: who the server is, and which clients it lets in.

    DIR/authority.key            signs certificates of servers; not needed again before they run out: keep it elsewhere
    DIR/server/                  for the server's machine: its key and certificate, clients' public keys
    DIR/clients/NAME/            for the machine of client NAME and nobody else: its key, the authority's certificate

A client knows the server by the authority's certificate (TLS), the server a client by its public key, and a client is
known under the name that its key was made for. They do for trying out and for a closed group; where there is an
authority already, put its files in their place.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tailorfl.deploy.flower.processes import Tls
from tailorfl.errors import ConfigError, MissingExtraError
from tailorfl.experiments.names import check_distinct, slug
from tailorfl.runs.files import replacing, reporting

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import Certificate, CertificateBuilder, GeneralName

AUTHORITY, SERVER_KEY, SERVER, NODE_KEY = "authority.crt", "server.key", "server.crt", "node.key"
DAYS = 365


def make_keys(folder: Path, hosts: Sequence[str], clients: Sequence[str], days: int = DAYS) -> None:
    """Writes keys and certificates for a new federation, or those of further clients of one that is there.

    Args:
        folder: where to; what is there is kept.
        hosts: names and addresses by which clients reach the server.
        clients: their names.
        days: how long certificates hold.

    Raises:
        ConfigError: two clients would have one folder, a client has a key already, or the first time no host is given.
        MissingExtraError: the package cryptography is missing.
    """
    check_distinct(list(clients), "the clients")
    for name in clients:
        if (folder / "clients" / slug(name)).exists():
            raise ConfigError(
                f"client '{name}' has a key in '{folder / 'clients' / slug(name)}'; to give it another one, move that "
                "folder away first"
            )
    server = folder / "server"
    if not (server / SERVER).is_file():
        if not hosts:
            raise ConfigError(
                "say by which name or address clients reach the server: --host server.example.org"
            )
        _make_server(folder, [*hosts, "localhost", "127.0.0.1"], days)
    for name in clients:
        _make_client(folder, name)


def server_keys(folder: Path) -> tuple[Tls, dict[str, Path]]:
    """Returns what secures a server, and the public keys of clients by name. Raises ConfigError where files lack."""
    place = folder if (folder / SERVER).is_file() else folder / "server"
    _need(place, [AUTHORITY, SERVER, SERVER_KEY])
    known = {path.stem: path for path in sorted((place / "clients").glob("*.pub"))}
    if not known:
        raise ConfigError(f"'{place / 'clients'}' has no public key of a client, so nobody could take part")
    return Tls(place / AUTHORITY, place / SERVER, place / SERVER_KEY), known


def client_keys(folder: Path) -> Tls:
    """Returns what secures a client. Raises ConfigError where files lack."""
    _need(folder, [AUTHORITY, NODE_KEY])
    return Tls(folder / AUTHORITY, node_key=folder / NODE_KEY)


def _need(folder: Path, names: Sequence[str]) -> None:
    lacking = [name for name in names if not (folder / name).is_file()]
    if lacking:
        raise ConfigError(
            f"'{folder}' has no {', no '.join(lacking)}; give a folder that tailorfl deploy keys has written: its "
            "server/ to the server, one of its clients/ to a client"
        )


def _make_server(folder: Path, hosts: Sequence[str], days: int) -> None:
    try:
        from cryptography import x509
        from cryptography.x509.oid import ExtendedKeyUsageOID
    except ImportError as error:
        raise MissingExtraError("cryptography", "deploy") from error
    authority, own = _new_key(), _new_key()
    usage = {"key_encipherment": False, "content_commitment": False, "data_encipherment": False}
    usage |= {"key_agreement": False, "encipher_only": False, "decipher_only": False}
    root = (
        _begun("tailorfl federation", "tailorfl federation", authority, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(
            x509.KeyUsage(digital_signature=False, key_cert_sign=True, crl_sign=True, **usage), critical=True
        )
    )
    leaf = (
        _begun(hosts[0], "tailorfl federation", own, days)
        .add_extension(
            x509.SubjectAlternativeName([_host(host) for host in dict.fromkeys(hosts)]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(
            x509.KeyUsage(digital_signature=True, key_cert_sign=False, crl_sign=False, **usage), critical=True
        )
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    )
    place = folder / "server"
    with reporting(folder, "write keys into"):
        (place / "clients").mkdir(parents=True, exist_ok=True)
        place.chmod(0o700)
    _write_key(folder / "authority.key", authority)
    _write_key(place / SERVER_KEY, own)
    _write(place / AUTHORITY, _signed(root, authority))
    _write(place / SERVER, _signed(leaf, authority))


def _make_client(folder: Path, name: str) -> None:
    from cryptography.hazmat.primitives import serialization

    key, place = _new_key(), folder / "clients" / slug(name)
    with reporting(folder, "write keys into"):
        place.mkdir(parents=True)
        place.chmod(0o700)
    _write_key(place / NODE_KEY, key, serialization.PrivateFormat.OpenSSH)
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    _write(folder / "server" / "clients" / f"{name}.pub", public + b"\n")
    _write(place / AUTHORITY, (folder / "server" / AUTHORITY).read_bytes())


def _begun(subject: str, issuer: str, key: EllipticCurvePrivateKey, days: int) -> CertificateBuilder:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject[:64])]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _signed(begun: CertificateBuilder, key: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import hashes, serialization

    made: Certificate = begun.sign(key, hashes.SHA384())
    return made.public_bytes(serialization.Encoding.PEM)


def _new_key() -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP384R1())


def _host(host: str) -> GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write_key(path: Path, key: EllipticCurvePrivateKey, form: object = None) -> None:
    from cryptography.hazmat.primitives import serialization

    chosen = serialization.PrivateFormat.PKCS8 if form is None else form
    text = key.private_bytes(serialization.Encoding.PEM, chosen, serialization.NoEncryption())  # type: ignore[arg-type]
    _write(path, text, 0o600)


def _write(path: Path, content: bytes, mode: int = 0o644) -> None:
    with replacing(path) as part:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
