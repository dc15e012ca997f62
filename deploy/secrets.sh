#!/bin/sh
# Makes the secrets that compose.yaml mounts, once: the keys of blocks' names, and the operators' key.
set -eu
cd "$(dirname "$0")"
umask 077
mkdir -p secrets
[ -s secrets/keyring.json ] || "${ROPEWAY:-ropeway}" keys keyring --file secrets/keyring.json
[ -s secrets/admin-key ] || python3 -c 'import secrets; print(secrets.token_urlsafe(32))' > secrets/admin-key
# The container's user is not the one who made them.
chmod 755 secrets
chmod 644 secrets/keyring.json secrets/admin-key
