"""The flags of TLS between workers, and what they open."""

import argparse
from pathlib import Path

from cachecore.transfer.tcp.tls import Tls, TlsError, TlsFiles, open_tls


def add_tls_arguments(group: "argparse._ArgumentGroup") -> None:
    """What `tls_of` reads."""
    group.add_argument(
        "--kv-tls-cert",
        type=Path,
        metavar="FILE",
        help="exchange KV over TLS alone, with this certificate (PEM); shown to peers on either side",
    )
    group.add_argument("--kv-tls-key", type=Path, metavar="FILE", help="its key (default: in the same file)")
    group.add_argument(
        "--kv-tls-ca",
        type=Path,
        metavar="FILE",
        help="who certifies peers, which must then all have a certificate (default: those whom the system trusts "
        "certify sources, and pullers need none)",
    )
    group.add_argument(
        "--kv-tls-name",
        default="",
        metavar="NAME",
        help="what peers' certificates are made out to (default: the host that a plan names)",
    )


def tls_of(args: argparse.Namespace, host: str) -> Tls | None:
    """None where there is no --kv-tls-cert. `host` is where KV is served. Raises TlsError, fit for a user."""
    if args.kv_tls_cert is None:
        if args.kv_tls_key is not None or args.kv_tls_ca is not None or args.kv_tls_name:
            raise TlsError("TLS for KV needs a certificate: --kv-tls-cert FILE")
        return None
    return open_tls(TlsFiles(args.kv_tls_cert, args.kv_tls_key, args.kv_tls_ca, args.kv_tls_name), host)
