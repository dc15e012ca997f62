"""Scopes, tenant keys and salts: frozen vectors, what must not be shared, what must not be forged."""

import base64
import hashlib
import hmac
import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from cachecore.blocks import BlockHasher, pack_tokens
from cachecore.scope import PUBLIC, Fidelity, IdentityScope, KeyId, Keyring, Naming, Salt, SaltError, TenantId

ACME, RIVAL = TenantId("acme"), TenantId("rival")
SECRET = bytes(range(32))
KEYRING = Keyring({0: SECRET, 1: bytes(range(32, 64))}, 0)
KEY_ID = KeyId(ACME, 0)
SCOPE = IdentityScope(
    model="smollm2",
    key_id=KEY_ID,
    block_size_tokens=4,
    revision="main",
    tokenizer="tok-1",
    adapter="poet",
    adapter_revision="7",
    client_salt=KEYRING.client_salt_digest(KEY_ID, "blue"),
)
TOKENS = pack_tokens(range(8))


def test_hash_keys() -> None:
    vectors = {
        (ACME, 0): "8bd5fd8e8c1b4f7b768c9d80b6b0e2a3d92f36978d0b7aa8940b649904638795",
        (ACME, 1): "5ac6a66cdd4f4591b623e334f03e93c92a29f644deb22a364451a55f5f8817fd",
        (PUBLIC, 0): "8fbec832e9658fa176b609803c30864e5fdb2b97ee753ef0a1fdba0efe813d9b",
    }
    assert {
        (key.tenant, key.epoch): KEYRING.hash_key(key).hex() for key in itertools.starmap(KeyId, vectors)
    } == vectors
    assert KEYRING.hash_key(KEY_ID) == hmac.new(SECRET, b"hash\x00\x00\x00\x00acme", hashlib.sha256).digest()


def test_frame_and_capability_keys() -> None:
    vectors = {
        (ACME, 0): (
            "4c88be333f03a52791c3dac133cb57980b96c53137421d75892369382a53d6e1",
            "19fcc727a730c67eaa73e2940b0d0643054b4d020bc9853d32f0063a23eab13e",
        ),
        (ACME, 1): (
            "2a00b1a5317e129df8df75dbac96679f29681a3a334428267dc04c7fa8ee08d8",
            "3d9e9db465b68040d5baa0818e4b9e434499f7aa2007fc74b4397cfffd541267",
        ),
        (PUBLIC, 0): (
            "0365b9b190d366a3a98f1753788bc96fbd6b12ef35239c0e645186c55b17faf1",
            "ad4253ae23fba4a5e6c6f240c0ce80498fcd26eaa8f9405a0931e171379c1ee5",
        ),
    }
    keys = [KeyId(tenant, epoch) for tenant, epoch in vectors]
    derived = {(key.tenant, key.epoch): (KEYRING.frame_key(key), KEYRING.capability_key(key)) for key in keys}
    assert {key: (frame.hex(), capability.hex()) for key, (frame, capability) in derived.items()} == vectors
    assert KEYRING.frame_key(KEY_ID) == hmac.new(SECRET, b"frame\x00\x00\x00\x00acme", hashlib.sha256).digest()
    with pytest.raises(KeyError):
        KEYRING.frame_key(KeyId(ACME, 2))


def test_client_salt_digest() -> None:
    assert SCOPE.client_salt.hex() == "d4776daf2d0fe4105c2755b9bff6759c"
    assert KEYRING.client_salt_digest(KEY_ID, "") == b""
    assert KEYRING.client_salt_digest(KeyId(RIVAL, 0), "blue") != SCOPE.client_salt


def test_canonical_form_and_root() -> None:
    fields = (b"smollm2", b"main", b"tok-1", b"poet", b"7", b"acme", bytes(4), SCOPE.client_salt, b"\x04\x00\x00\x00")
    assert SCOPE.canonical() == b"".join(len(field).to_bytes(4, "little") + field for field in fields)
    naming = Naming.of(SCOPE, KEYRING)
    assert naming.root.hex() == "1d4bb926891a0d2ac407fed253e4c598"
    assert naming.root == BlockHasher(KEYRING.hash_key(KEY_ID), 4).root(SCOPE.canonical())


def test_salts_on_the_wire() -> None:
    assert KEYRING.mint_salt(Salt(KEY_ID)) == "rw1.acme.0.0.-._TQQ60EUCOpvFzPY"
    minted = KEYRING.mint_salt(Salt(KEY_ID, Fidelity.ROTATED, SCOPE.client_salt))
    assert minted == "rw1.acme.0.2.1Hdtry0P5BBcJ1W5v_Z1nA.qb8vp6Nnl3AmXyde"


def names_of(scope: IdentityScope, keyring: Keyring = KEYRING) -> bytes:
    naming = Naming.of(scope, keyring)
    return naming.hasher.chain(naming.root, TOKENS)


def test_every_field_of_a_scope_separates() -> None:
    scopes = [
        SCOPE,
        replace(SCOPE, model="other"),
        replace(SCOPE, revision="v2"),
        replace(SCOPE, tokenizer="tok-2"),
        replace(SCOPE, adapter="critic"),
        replace(SCOPE, adapter_revision="8"),
        replace(SCOPE, key_id=KeyId(RIVAL, 0)),
        replace(SCOPE, key_id=KeyId(ACME, 1)),
        replace(SCOPE, key_id=KeyId(PUBLIC, 0)),
        replace(SCOPE, client_salt=b""),
        replace(SCOPE, block_size_tokens=2),
    ]
    names = [names_of(scope)[at : at + 16] for scope in scopes for at in (0, 16)]
    assert len(set(names)) == 2 * len(scopes)


def test_neighbouring_fields_do_not_run_together() -> None:
    pairs = [
        (replace(SCOPE, model="ab", revision=""), replace(SCOPE, model="a", revision="b")),
        (replace(SCOPE, adapter="", adapter_revision="poet"), replace(SCOPE, adapter="poet", adapter_revision="")),
        (replace(SCOPE, tokenizer="x", adapter=""), replace(SCOPE, tokenizer="", adapter="x")),
    ]
    for left, right in pairs:
        assert left.canonical() != right.canonical()


def test_an_adapter_and_a_salt_of_one_name_differ() -> None:
    base = IdentityScope("base", KEY_ID, 4)
    adapter = replace(base, adapter="X")
    salted = replace(base, client_salt=b"X")
    digested = replace(base, client_salt=KEYRING.client_salt_digest(KEY_ID, "X"))
    assert len({names_of(scope) for scope in (base, adapter, salted, digested)}) == 4


def test_tenants_of_one_text_have_nothing_in_common() -> None:
    ours, theirs = (IdentityScope("m", KEYRING.key_id(tenant), 4) for tenant in (ACME, RIVAL))
    our_names, their_names = names_of(ours), names_of(theirs)
    assert not {our_names[:16], our_names[16:]} & {their_names[:16], their_names[16:]}
    contents = [Naming.of(scope, KEYRING).hasher.contents(TOKENS) for scope in (ours, theirs)]
    assert not set(contents[0]) & set(contents[1])


def test_one_tenant_under_another_secret() -> None:
    assert names_of(SCOPE) != names_of(SCOPE, Keyring({0: bytes(32)}, 0))


class TestSalts:
    @pytest.mark.parametrize("fidelity", list(Fidelity))
    @pytest.mark.parametrize("client_salt", ["", "blue", "ünïcode \x00 ."])
    def test_what_is_minted_can_be_read(self, fidelity: Fidelity, client_salt: str) -> None:
        salt = Salt(KEY_ID, fidelity, KEYRING.client_salt_digest(KEY_ID, client_salt))
        minted = KEYRING.mint_salt(salt)
        assert KEYRING.read_salt(minted) == salt
        assert KEYRING.mint_salt(salt) == minted
        assert "blue" not in minted

    @pytest.mark.parametrize("text", ["", "a client's own", "rw2.acme.0.0.-.AAAA", "RW1.acme.0.0.-.AAAA"])
    def test_others_salts_are_not_ours(self, text: str) -> None:
        assert KEYRING.read_salt(text) is None

    def test_no_byte_may_change(self) -> None:
        minted = KEYRING.mint_salt(Salt(KEY_ID, Fidelity.EXACT, SCOPE.client_salt))
        for at in range(len("rw1."), len(minted)):
            for replacement in ("A", "1", ".", "-"):
                forged = minted[:at] + replacement + minted[at + 1 :]
                if forged != minted:
                    with pytest.raises(SaltError):
                        KEYRING.read_salt(forged)

    @pytest.mark.parametrize(
        "forged",
        [
            "rw1.",
            "rw1.acme",
            "rw1.rival.0.0.-._TQQ60EUCOpvFzPY",
            "rw1.acme.1.0.-._TQQ60EUCOpvFzPY",
            "rw1.acme.0.1.-._TQQ60EUCOpvFzPY",
            "rw1.acme.0.9.-._TQQ60EUCOpvFzPY",
            "rw1.acme.0.0.-.",
            "rw1.acme.0.0.-._TQQ60EUCOpvFzP",
            "rw1.acme.0.0.-._TQQ60EUCOpvFzPYAAAA",
            "rw1.acme.00.0.-._TQQ60EUCOpvFzPY",
            "rw1.acme.7.0.-._TQQ60EUCOpvFzPY",
            "rw1.ac me.0.0.-._TQQ60EUCOpvFzPY",
            "rw1.acme.0.0.é._TQQ60EUCOpvFzPY",
            "rw1.acme.0.0.-.é",
        ],
    )
    def test_forgeries(self, forged: str) -> None:
        with pytest.raises(SaltError):
            KEYRING.read_salt(forged)

    def test_the_hash_key_does_not_mint(self) -> None:
        """Whoever could name blocks of a tenant could not speak for it: salts are authenticated under another key."""
        body = "rw1.rival.0.0.-"
        mac = hmac.digest(KEYRING.hash_key(KeyId(RIVAL, 0)), body.encode(), "sha256")[:12]
        with pytest.raises(SaltError, match="MAC"):
            KEYRING.read_salt(f"{body}.{base64.urlsafe_b64encode(mac).decode()}")


class TestRotation:
    def test_old_names_and_salts_stay_readable(self) -> None:
        before = Keyring({0: SECRET}, 0)
        after = before.rotate()
        assert after.current_epoch == 1
        assert after.key_id(ACME) == KeyId(ACME, 1)
        assert after.hash_key(KEY_ID) == before.hash_key(KEY_ID)
        assert after.read_salt(before.mint_salt(Salt(KEY_ID))) == Salt(KEY_ID)
        assert names_of(SCOPE, after) == names_of(SCOPE, before)
        assert names_of(replace(SCOPE, key_id=after.key_id(ACME)), after) != names_of(SCOPE, before)

    def test_a_dropped_epoch_is_not_read(self) -> None:
        rotated = Keyring({0: SECRET}, 0).rotate()
        old_salt, new_salt = rotated.mint_salt(Salt(KeyId(ACME, 0))), rotated.mint_salt(Salt(KeyId(ACME, 1)))
        dropped = Keyring({1: rotated.secrets_by_epoch[1]}, 1)
        assert dropped.read_salt(new_salt) == Salt(KeyId(ACME, 1))
        with pytest.raises(SaltError):
            dropped.read_salt(old_salt)
        with pytest.raises(KeyError):
            dropped.hash_key(KeyId(ACME, 0))

    def test_rotating_twice_counts_on(self) -> None:
        rotated = KEYRING.rotate().rotate()
        assert sorted(rotated.secrets_by_epoch) == [0, 1, 2, 3]
        assert len(set(rotated.secrets_by_epoch.values())) == 4


class TestKeyringFile:
    def test_it_comes_back_and_is_its_owners_alone(self, tmp_path: Path) -> None:
        path = tmp_path / "deep" / "keyring.json"
        KEYRING.save(path)
        assert Keyring.load(path) == KEYRING
        assert path.stat().st_mode & 0o777 == 0o600
        assert json.loads(path.read_text())["current"] == 0

    def test_saving_again_closes_an_open_file_and_leaves_no_other(self, tmp_path: Path) -> None:
        path = tmp_path / "keyring.json"
        path.write_text("{}")
        path.chmod(0o644)
        KEYRING.save(path)
        rotated = KEYRING.rotate()
        rotated.save(path)
        assert path.stat().st_mode & 0o777 == 0o600
        assert Keyring.load(path) == rotated
        assert list(tmp_path.iterdir()) == [path]

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "[]",
            "null",
            "{}",
            '{"current": 0}',
            '{"current": 0, "secrets": []}',
            '{"current": 0, "secrets": {}}',
            '{"current": 1, "secrets": {"0": "%s"}}' % ("00" * 32),
            '{"current": 0, "secrets": {"0": "%s"}}' % ("00" * 31),
            '{"current": 0, "secrets": {"0": "nothex"}}',
            '{"current": 0, "secrets": {"zero": "%s"}}' % ("00" * 32),
            '{"current": null, "secrets": {"0": "%s"}}' % ("00" * 32),
            '{"current": 0, "secrets": {"0": null}}',
        ],
    )
    def test_what_is_wrong_is_said_with_the_path(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "keyring.json"
        path.write_text(text)
        with pytest.raises(ValueError, match=r"keyring\.json"):
            Keyring.load(path)

    def test_a_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="No such file"):
            Keyring.load(tmp_path / "none.json")

    def test_secrets_do_not_show(self) -> None:
        keyring = Keyring.generate()
        keyring.hash_key(keyring.key_id(ACME))
        assert repr(keyring) == "Keyring(epochs=[0], current=0)"
        assert len(keyring.secrets_by_epoch[0]) == 32
        assert keyring != Keyring.generate()


@pytest.mark.parametrize("tenant", ["", "a.b", "a b", "x" * 65, "ü", "a\n"])
def test_tenant_ids_that_could_break_a_salt(tenant: str) -> None:
    with pytest.raises(ValueError, match="tenant id"):
        KeyId(TenantId(tenant), 0)


@pytest.mark.parametrize("epoch", [-1, 2**32])
def test_key_epochs_are_u32(epoch: int) -> None:
    with pytest.raises(ValueError, match="u32"):
        KeyId(ACME, epoch)
