"""Keys and certificates of a federation: they identify the server and the admitted clients.

KEYS/authority.key           signs certificates; needed again for further clients and for renewals: keep it elsewhere
KEYS/server/                 for the server's machine: its key and certificate, the authority's, the revoked ones
KEYS/clients/NAME/           for the machine of client NAME only: its key and certificate, the authority's

Both sides prove their identity by a certificate of one authority (mutual TLS), and a client is known under the name in
its certificate. If you have an authority already, use its files instead.
"""

from __future__ import annotations

import datetime
import ipaddress
import logging
import os
import secrets
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tailorfl.errors import ConfigError, needs_extra
from tailorfl.runs.files import replacing, reporting, write_text
from tailorfl.settings.names import check_distinct, slug

with needs_extra("cryptography", "deploy"):
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

log = logging.getLogger(__name__)

ROOT_KEY, AUTHORITY, REVOKED = "authority.key", "authority.crt", "revoked"
SERVER_KEY, SERVER, CLIENT_KEY, CLIENT = "server.key", "server.crt", "client.key", "client.crt"
DAYS = 365
LONGEST_NAME = 64
"""Largest number of bytes of a name in a certificate."""
HERE = ("localhost", "127.0.0.1")
"""Names of the server's own machine, which every certificate of a server has."""
CURVE = ec.SECP384R1()
UNUSED = (
    *("key_encipherment", "content_commitment", "data_encipherment"),
    *("key_agreement", "encipher_only", "decipher_only"),
)
"""Key usages that no certificate here has."""
EARLY = datetime.timedelta(days=1)
"""Time by which the validity of a certificate begins before it is made: clocks differ."""


@dataclass(frozen=True)
class Tls:
    """The files that identify one side: the certificate of the authority, its own certificate, and its key."""

    authority: Path
    certificate: Path
    key: Path

    def for_server(self) -> ssl.SSLContext:
        """Return the server's TLS context: only clients with a certificate of the authority get an answer.

        Raises:
            ConfigError: the files do not belong together.
        """
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        return context

    def for_client(self) -> ssl.SSLContext:
        """Return the client's TLS context. Raises ConfigError if the files do not belong together."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, side: int) -> ssl.SSLContext:
        context = ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            context.load_verify_locations(self.authority)
            context.load_cert_chain(self.certificate, self.key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"'{self.certificate}' and '{self.key}' cannot be used: {error}; use a folder as tailorfl deploy keys "
                "wrote it"
            ) from error
        return context

    def holder(self) -> str:
        """Return the name in the certificate."""
        return _name(_read(self.certificate))


class Revoked:
    """The revoked certificates: the list `revoked` in the server's folder, read when it changes.

    A line begins with a certificate's serial number, as `tailorfl deploy keys --revoke` writes it, or is the name of a
    client, which revokes all its certificates.
    """

    def __init__(self, folder: Path) -> None:
        self._path = _server_folder(folder) / REVOKED
        self._version: tuple[int, int] | None = None
        self._is_readable = True
        self._names: set[str] = set()
        self._serials: set[str] = set()

    def why(self, name: str, serial: str) -> str:
        """Return why the holder of a certificate is not admitted, "" if it is."""
        try:
            status = self._path.stat()
            version = status.st_mtime_ns, status.st_size
            if version != self._version:
                # an editor may have put a byte order mark before the first name
                self._names = set(map(str.strip, self._path.read_text("utf-8-sig").splitlines())) - {""}
                self._serials = {_number(line.split()[0]) for line in self._names}
                self._version = version
            self._is_readable = True
        except FileNotFoundError:
            return ""
        except (OSError, ValueError) as error:  # clients get status 500, and keep trying
            if self._is_readable:
                log.error("no client is admitted, since '%s' cannot be read: %s", self._path, error)
            self._is_readable = False
            raise
        is_listed = name in self._names or _number(serial) in self._serials
        return f"the certificate of '{name}' is revoked" if is_listed else ""


def _number(serial: str) -> str:
    return serial.upper().lstrip("0")


def make_keys(folder: Path, hosts: Sequence[str], clients: Sequence[str], days: int = DAYS) -> None:
    """Write keys and certificates for a new federation, or for further clients of an existing one.

    Args:
        folder: the folder to write into; existing files are kept.
        hosts: names and addresses by which clients reach the server.
        clients: their names.
        days: days for which certificates are valid.

    Raises:
        ConfigError: two clients would share a folder, a client has a key already, the authority's key is missing, no
            host is given for a new federation, or a name cannot be in a certificate.
        MissingExtraError: the package cryptography is missing.
    """
    check_distinct(list(clients), "the clients")
    for name in clients:
        if (
            (existing := folder / "clients" / slug(name)) / CLIENT
        ).exists():  # the last but one that is written
            raise ConfigError(
                f"client '{name}' already has a key in '{existing}'; replace it with --renew {name}"
            )
        if not 0 < (size := len(name.encode())) <= LONGEST_NAME:
            raise ConfigError(f"a client's name may have 1 to {LONGEST_NAME} bytes, but '{name}' has {size}")
    if (folder / "server" / SERVER).is_file():
        if hosts:
            raise ConfigError(
                f"the server already has a certificate in '{folder / 'server'}'; leave out --host, or replace it with "
                f"--renew server --host {hosts[0]}"
            )
    else:
        if not hosts:
            raise ConfigError(
                "give the name or address at which clients reach the server: --host server.example.org"
            )
        for host in hosts:
            _host(host)  # before anything is written
        # One that is there has signed the clients' certificates, wherever the server's folder is.
        if not (folder / ROOT_KEY).is_file():
            _make_authority(folder, days)
        _make_server(folder, hosts, days)
    for name in clients:
        _make_client(folder, name, days)


def renew(folder: Path, name: str, hosts: Sequence[str] = (), days: int = DAYS) -> None:
    """Write a new key and certificate for one client, or for the "server"; a client's old one is revoked.

    Raises:
        ConfigError: there is none to renew, or the authority's key is missing or its certificate expired.
    """
    if name == "server" and not (folder / "clients" / "server").exists():
        _need(folder / "server", [SERVER])
        _make_server(folder, hosts or _hosts(_read(folder / "server" / SERVER)), days)
        return
    _authority(folder)  # without its key, the client would keep no certificate that holds
    revoke(folder, name)
    _make_client(folder, name, days)


def revoke(folder: Path, name: str) -> None:
    """Revoke the present certificate of a client. Raises ConfigError if it has none."""
    certificate = folder / "clients" / slug(name) / CLIENT
    _need(certificate.parent, [CLIENT])
    path = folder / "server" / REVOKED
    before = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    # a name that was added by hand may lack its line end
    write_text(path, "\n".join([*before, f"{_read(certificate).serial_number:X} {name}\n"]))


def server_keys(folder: Path) -> Tls:
    """Return the files that secure a server. Raises ConfigError if one is missing or expired."""
    return _tls(_server_folder(folder), SERVER, SERVER_KEY)


def client_keys(folder: Path) -> Tls:
    """Return the files that secure a client. Raises ConfigError if one is missing or expired."""
    return _tls(folder, CLIENT, CLIENT_KEY)


def _tls(folder: Path, certificate: str, key: str) -> Tls:
    _need(folder, [AUTHORITY, certificate, key])
    until = _read(folder / certificate).not_valid_after_utc
    if until < datetime.datetime.now(datetime.UTC):  # the other side would just close the connection
        raise ConfigError(
            f"the certificate '{folder / certificate}' expired at {until:%Y-%m-%d %H:%M} UTC; renew it (tailorfl "
            "deploy keys --renew)"
        )
    return Tls(folder / AUTHORITY, folder / certificate, folder / key)


def _server_folder(folder: Path) -> Path:
    return folder if (folder / SERVER).is_file() else folder / "server"


def _need(folder: Path, names: Sequence[str]) -> None:
    lacking = [name for name in names if not (folder / name).is_file()]
    if lacking:
        raise ConfigError(
            f"'{folder}' has no {', no '.join(lacking)}; use a folder that tailorfl deploy keys wrote: server/ for the "
            "server, one in clients/ for a client"
        )


def _make_authority(folder: Path, days: int) -> None:
    key, name = ec.generate_private_key(CURVE), f"tailorfl federation {secrets.token_hex(4)}"
    _make_folder(folder / "server")
    _make_folder(folder / "clients")
    _write(folder / "server" / AUTHORITY, _signed(name, key, name, key, None, days, ca=True))
    _write_key(folder / ROOT_KEY, key)  # last: with it the authority is complete


def _make_server(folder: Path, hosts: Sequence[str], days: int) -> None:
    key, names = ec.generate_private_key(CURVE), list(map(_host, dict.fromkeys([*hosts, *HERE])))
    certificate = _signed(hosts[0], key, *_authority(folder), days, hosts=names)
    _write_key(folder / "server" / SERVER_KEY, key)
    _write(folder / "server" / SERVER, certificate)


def _make_client(folder: Path, name: str, days: int) -> None:
    key, own_folder = ec.generate_private_key(CURVE), folder / "clients" / slug(name)
    certificate = _signed(name, key, *_authority(folder), days)
    _make_folder(own_folder)
    _write_key(own_folder / CLIENT_KEY, key)
    _write(own_folder / CLIENT, certificate)
    _write(own_folder / AUTHORITY, (folder / "server" / AUTHORITY).read_bytes())


def _make_folder(folder: Path) -> None:
    with reporting(folder, "write keys into"):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)


def _authority(folder: Path) -> tuple[str, ec.EllipticCurvePrivateKey, datetime.datetime]:
    """Return the authority's name, its key, and the end of its certificate.

    Raises:
        ConfigError: the key or the certificate is missing, or the certificate has expired.
    """
    path = folder / ROOT_KEY
    if not path.is_file():
        raise ConfigError(f"'{path}', which signs certificates, is missing; put it back while you make keys")
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"'{path}' is not an elliptic-curve key, as tailorfl deploy keys makes it")
    _need(folder / "server", [AUTHORITY])
    certificate = _read(folder / "server" / AUTHORITY)
    until = certificate.not_valid_after_utc
    if until < datetime.datetime.now(datetime.UTC):  # no side accepts what it signs now
        raise ConfigError(
            f"the authority's certificate in '{folder}' expired at {until:%Y-%m-%d %H:%M} UTC; make keys in a new "
            "folder (tailorfl deploy keys), and give the server and all clients theirs"
        )
    return _name(certificate), key, until


def _signed(
    subject: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    authority: ec.EllipticCurvePrivateKey,
    latest: datetime.datetime | None,
    days: int,
    *,
    ca: bool = False,
    hosts: Sequence[x509.GeneralName] = (),
) -> bytes:
    """Return a certificate of the authority: its own (`ca`), one for a server (with `hosts`), or for a client.

    It is valid for `days`, but not after `latest`, when the authority's own ends.
    """
    today = datetime.datetime.now(datetime.UTC)
    until = today + datetime.timedelta(days=days)
    unused = dict.fromkeys(UNUSED, False)
    usage = x509.KeyUsage(digital_signature=not ca, key_cert_sign=ca, crl_sign=ca, **unused)
    begun = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject[:LONGEST_NAME])]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(today - EARLY)
        .not_valid_after(until if latest is None else min(until, latest))
        .add_extension(x509.BasicConstraints(ca=ca, path_length=0 if ca else None), critical=True)
        .add_extension(usage, critical=True)
    )
    if not ca:
        side = ExtendedKeyUsageOID.SERVER_AUTH if hosts else ExtendedKeyUsageOID.CLIENT_AUTH
        begun = begun.add_extension(x509.ExtendedKeyUsage([side]), critical=False)
    if hosts:
        begun = begun.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
    return begun.sign(authority, hashes.SHA384()).public_bytes(serialization.Encoding.PEM)


def _read(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"'{path}' is not a certificate: {error}") from error


def _name(certificate: x509.Certificate) -> str:
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if names else ""


def _hosts(certificate: x509.Certificate) -> list[str]:
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in names]


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        if not host:
            raise ValueError("it is empty")
        return x509.DNSName(host)
    except ValueError as error:
        raise ConfigError(
            f"'{host}' cannot be a name in a certificate ({error}); write a name of the network in its ASCII form "
            "(xn--...)"
        ) from error


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    form, encryption = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    _write(path, key.private_bytes(serialization.Encoding.PEM, form, encryption), 0o600)


def _write(path: Path, content: bytes, mode: int = 0o644) -> None:
    with replacing(path) as part:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
