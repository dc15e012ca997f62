import json
import stat
from hashlib import sha256
from pathlib import Path

import pytest

from cachecore.scope import DEFAULT_TENANT, TenantId
from gateway.api_keys import add_api_key
from gateway.errors import ConfigError, Unauthorized, Unavailable
from gateway.tenants import KeyWatch, OperatorKey, Roster, Tenant, Tenants


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    return tmp_path / "keys.jsonl"


def loaded(file: Path) -> Tenants:
    """As the file says."""
    tenants = Tenants(Roster({}))
    KeyWatch(tenants, file, None)
    return tenants


def test_without_keys_everyone_is_the_default_tenant() -> None:
    tenants = Tenants(None)
    assert tenants.open
    assert tenants.authenticate(None) == Tenant(DEFAULT_TENANT)
    assert tenants.authenticate(b"Bearer sk-anything") == Tenant(DEFAULT_TENANT)


def test_each_key_names_its_tenant(keys_file: Path) -> None:
    acme, globex, second = (add_api_key(keys_file, name) for name in ("acme", "globex", "acme"))
    tenants = loaded(keys_file)
    assert not tenants.open
    assert tenants.authenticate(b"Bearer " + acme.encode()).id == "acme"
    assert tenants.authenticate(b"bearer   " + globex.encode() + b" ").id == "globex"
    assert tenants.authenticate(b"Bearer " + second.encode()).id == "acme"


@pytest.mark.parametrize(
    "header",
    [None, b"", b"Bearer ", b"Bearer wrong", b"Basic dXNlcjpwYXNz", b"rwk_", b"\xff\xfe\xfd\xfc\xfb\xfa\xf9\xf8"],
)
def test_anything_else_is_refused(keys_file: Path, header: bytes | None) -> None:
    add_api_key(keys_file, "acme")
    with pytest.raises(Unauthorized):
        loaded(keys_file).authenticate(header)


def test_the_hash_in_the_file_opens_nothing(keys_file: Path) -> None:
    add_api_key(keys_file, "acme")
    stored = json.loads(keys_file.read_text())["key_sha256"]
    with pytest.raises(Unauthorized):
        loaded(keys_file).authenticate(b"Bearer " + stored.encode())


def test_a_file_without_keys_is_closed_to_all(keys_file: Path) -> None:
    keys_file.write_text("# nobody yet\n\n")
    tenants = loaded(keys_file)
    assert not tenants.open
    with pytest.raises(Unauthorized):
        tenants.authenticate(b"Bearer x")


def test_the_file_holds_the_hash_alone_and_is_private(keys_file: Path) -> None:
    key = add_api_key(keys_file, "acme")
    text = keys_file.read_text()
    assert key not in text
    assert json.loads(text)["key_sha256"] == sha256(key.encode()).hexdigest()
    assert stat.S_IMODE(keys_file.stat().st_mode) == 0o600


def test_a_key_is_appended_after_a_line_without_an_end(keys_file: Path) -> None:
    first = add_api_key(keys_file, "acme")
    keys_file.write_text(keys_file.read_text().rstrip("\n"))
    second = add_api_key(keys_file, "globex")
    tenants = loaded(keys_file)
    assert [tenants.authenticate(f"Bearer {key}".encode()).id for key in (first, second)] == ["acme", "globex"]


@pytest.mark.parametrize("tenant", ["", "two words", "public", "x" * 65])
def test_names_that_are_no_tenants(keys_file: Path, tenant: str) -> None:
    with pytest.raises(ConfigError):
        add_api_key(keys_file, tenant)
    assert not keys_file.exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: "),
        ('{"tenant": "a"}', "line 2: Object missing required field `key_sha256`"),
        ('{"tenant": "a", "key_sha256": "00", "extra": 1}', "line 2: Object contains unknown field `extra`"),
        ('{"tenant": "a", "key_sha256": "zz"}', "line 2: non-hexadecimal"),
        ('{"tenant": "a", "key_sha256": "0011"}', "line 2: key_sha256 has 2 bytes, not 32"),
        (json.dumps({"tenant": "public", "key_sha256": "00" * 32}), "line 2: 'public' is what all tenants share"),
        (json.dumps({"tenant": "a b", "key_sha256": "00" * 32}), "line 2: tenant id 'a b' must match"),
    ],
)
def test_a_wrong_line_is_named(keys_file: Path, line: str, message: str) -> None:
    keys_file.write_text(f"# keys\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        loaded(keys_file)
    assert str(caught.value).startswith(f"{keys_file}: {message}")


def test_one_key_for_two_tenants_is_refused(keys_file: Path) -> None:
    lines = [json.dumps({"tenant": tenant, "key_sha256": "00" * 32}) for tenant in ("a", "b")]
    keys_file.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="line 2: this key is given twice"):
        loaded(keys_file)


def test_a_broken_file_gets_no_further_keys(keys_file: Path) -> None:
    keys_file.write_text("{\n")
    with pytest.raises(ConfigError):
        add_api_key(keys_file, "acme")
    assert keys_file.read_text() == "{\n"


def test_what_is_done_for_a_tenant_ends_with_its_last_key(keys_file: Path) -> None:
    add_api_key(keys_file, "acme")
    tenants = loaded(keys_file)
    assert tenants.absent(TenantId("acme")) == Tenant(TenantId("acme"))
    with pytest.raises(Unauthorized):
        tenants.absent(TenantId("globex"))
    tenants.roster = Roster({}, complete=False)
    with pytest.raises(Unavailable):
        tenants.absent(TenantId("acme"))
    assert Tenants(None).absent(TenantId("anyone")).id == "anyone"


def test_operator_key(tmp_path: Path) -> None:
    path = tmp_path / "admin.key"
    path.write_text("0123456789abcdef0123\n")
    key = OperatorKey.load(path)
    assert not key.open
    key.check(b"Bearer 0123456789abcdef0123")
    for header in (None, b"Bearer 0123456789abcdef012", b"Basic 0123456789abcdef0123"):
        with pytest.raises(Unauthorized):
            key.check(header)


def test_no_operator_key_is_open() -> None:
    key = OperatorKey.load(None)
    assert key.open
    key.check(None)


def test_a_weak_operator_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "admin.key"
    path.write_text("secret\n")
    with pytest.raises(ConfigError, match="at least 16 characters"):
        OperatorKey.load(path)
