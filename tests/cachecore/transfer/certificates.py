"""Throwaway authorities and what they certify, as files in PEM."""

import datetime
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from cachecore.transfer.tcp.tls import Tls, TlsFiles, open_tls

DAY = datetime.timedelta(days=1)
NAMES = ("127.0.0.1", "localhost", "worker.test")


@dataclass(frozen=True)
class Authority:
    directory: Path
    name: str
    key: ec.EllipticCurvePrivateKey
    file: Path

    @classmethod
    def make(cls, directory: Path, name: str = "authority") -> "Authority":
        key, file = ec.generate_private_key(ec.SECP256R1()), directory / f"{name}.crt"
        certificate = _builder(name, name, key, expired=False).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        file.write_bytes(certificate.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        return cls(directory, name, key, file)

    def certify(self, name: str, *names: str, expired: bool = False, password: bytes = b"") -> TlsFiles:
        """A certificate for addresses and names (by default this machine's loopback), its key apart."""
        key = ec.generate_private_key(ec.SECP256R1())
        made_out_to = x509.SubjectAlternativeName([_general_name(one) for one in names or NAMES])
        builder = _builder(name, self.name, key, expired).add_extension(made_out_to, critical=False)
        files = TlsFiles(self.directory / f"{name}.crt", self.directory / f"{name}.key", self.file)
        files.certificate.write_bytes(builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        encryption = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
        assert files.key is not None
        files.key.write_bytes(
            key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
        )
        return files

    def member(self, name: str = "member") -> Tls:
        """One whom the others of this authority believe."""
        return open_tls(self.certify(name), "127.0.0.1")


def _builder(subject: str, issuer: str, key: ec.EllipticCurvePrivateKey, expired: bool) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_named(subject))
        .issuer_name(_named(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 3 * DAY)
        .not_valid_after(now - DAY if expired else now + DAY)
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)
