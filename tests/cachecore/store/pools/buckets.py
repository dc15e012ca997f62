"""A server that speaks S3 (moto's), in a process of its own."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import obstore
from obstore.store import S3Store

from cachecore.store.pools import Bucket
from tests.cachecore.store.servers import Certificates, free_port, wait_until

BUCKET = "ropeway-pool"
CREDENTIALS = {"access_key_id": "test", "secret_access_key": "test", "region": "us-east-1"}


class S3Server:
    def __init__(self, directory: Path, certificates: Certificates | None = None) -> None:
        self.port = free_port()
        self.certificates = certificates
        self.log = directory / "moto.log"
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        if certificates is not None:
            command += ["-c", str(certificates.cert), "-k", str(certificates.key)]
        # In memory: moto's own spooling to disk would be measured with it.
        environment = {
            **os.environ,
            "MOTO_S3_DEFAULT_MAX_KEYS": "1000",
            "MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": "1073741824",
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)

    @property
    def url(self) -> str:
        return f"http{'s' if self.certificates else ''}://127.0.0.1:{self.port}"

    def ready(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError(f"moto exited with {self.process.returncode}:\n{self.log.read_text()[-2000:]}")
        with contextlib.suppress(Exception):
            return bool(self._create_bucket())
        return False

    def bucket(self, prefix: str) -> Bucket:
        return Bucket(BUCKET, prefix, self.url, **CREDENTIALS)

    def store(self, prefix: str) -> S3Store:
        return S3Store(BUCKET, prefix=prefix, endpoint=self.url, client_options={"allow_http": True}, **CREDENTIALS)

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        self.thaw()
        self.process.terminate()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _create_bucket(self) -> bool:
        import boto3

        client = boto3.client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id="test",
            aws_secret_access_key="test",
            region_name="us-east-1",
            verify=str(self.certificates.ca) if self.certificates else None,
        )
        client.create_bucket(Bucket=BUCKET)
        client.close()
        return True


@contextlib.contextmanager
def start_s3(directory: Path, certificates: Certificates | None = None) -> Iterator[S3Server]:
    server = S3Server(directory, certificates)
    try:
        wait_until(server.ready, 60.0, "start of moto's server")
        yield server
    finally:
        server.stop()


def contents(store: S3Store) -> dict[str, int]:
    """Objects by path, with their sizes."""
    return {meta["path"]: meta["size"] for page in obstore.list(store) for meta in page}
