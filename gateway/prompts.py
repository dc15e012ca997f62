"""Naming prompts for the pipeline: which renderer, which key, which salt; now, off the loop, or at the worker."""

import asyncio
from array import array
from collections.abc import Awaitable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

import orjson

from cachecore.blocks import EMPTY_CHAIN, PrefixHash, pack_tokens
from cachecore.prompts.contract import NamedPrompt, PromptError, Rendered
from cachecore.prompts.messages import has_media
from cachecore.prompts.naming import PromptNamer, Work
from cachecore.scope import (
    CLIENT_SALT_BYTES_MAX,
    DEFAULT_TENANT,
    IdentityScope,
    KeyId,
    Keyring,
    Naming,
    Salt,
    SaltError,
)
from gateway.api.prompts import CHARACTERS_PER_TOKEN, prompt_of, weight_tokens
from gateway.errors import BadRequest
from gateway.fleet.worker import ModelPool
from gateway.remote_tokens import RemoteTokens
from gateway.requests import Kind, Request

NAMINGS_MAX = 16_384

# Members of enumerations are looked up by a slow path.
_CHAT, _COMPLETION = Kind.CHAT, Kind.COMPLETION


class SaltedNaming(NamedTuple):
    """How one tenant's prompts to one model are named, and the salt that says so to the engine."""

    naming: Naming
    salt_json: bytes


class Prompts:
    def __init__(self, keyring: Keyring, namer: PromptNamer, long_prompt_characters: int) -> None:
        self._keyring = keyring
        self._namer = namer
        self._long_prompt_characters = long_prompt_characters
        self._namings: dict[tuple[str, int, str, str, str], SaltedNaming] = {}
        self.remote: RemoteTokens | None = None
        """For models whose prompts cannot be tokenized here."""

    def statistics(self) -> Mapping[str, Any]:
        remote = {} if self.remote is None else {"remote": asdict(self.remote.counters)}
        return {**asdict(self._namer.counters), **remote}

    # Keys and salts

    def salt_json(self, request: Request, pool: ModelPool) -> bytes | None:
        """The `cache_salt` to send, as JSON; None for routes whose engines take none."""
        if request.salt_json is not None:
            return request.salt_json
        if request.foreign and not any(request.path in worker.traits.salted_paths for worker in pool.workers):
            return None
        return self._salted(request, pool).salt_json

    def identity(self, request: Request, pool: ModelPool) -> tuple[KeyId, PrefixHash]:
        """Under which key a named request's blocks are named, and the root of their chain."""
        naming = self._salted(request, pool).naming
        return naming.scope.key_id, naming.root

    def passages_of(self, request: Request, pool: ModelPool) -> tuple[Naming, bytes] | None:
        """A named request's naming and its tokens, packed; None where only its worker can tell them."""
        tokens = self.tokens_of(request, pool)
        return None if tokens is None else (self._salted(request, pool).naming, pack_tokens(tokens))

    def tokens_of(self, request: Request, pool: ModelPool) -> "array[int] | None":
        """A named request's token ids; None where only its worker can tell them. What of them is not cached is encoded
        once more."""
        renderer, kind = pool.renderer, request.kind
        prompt = None if kind is _CHAT else request.values.get("prompt")
        if isinstance(prompt, list) and all(type(token) is int for token in prompt):
            return array("I", prompt)
        if renderer is None or request.reshaped or not (kind is _CHAT or isinstance(prompt, str)):
            return None
        rendered = renderer.chat(request.values) if kind is _CHAT else renderer.text(str(prompt))
        return self._namer.tokens(renderer, self._salted(request, pool).naming, rendered)

    def naming_for_events(self, pool: ModelPool, salt: str | None, adapter: str | None) -> Naming | None:
        """How blocks announced under a salt are named; None for a salt that is forged or of a dropped epoch.

        An engine that announces blocks without a salt serves the one default tenant; a foreign salt is treated as a
        client's own.
        """
        try:
            minted = self._keyring.read_salt(salt) if salt else None
        except SaltError:
            return None
        if minted is None:
            minted = Salt(self._keyring.key_id(DEFAULT_TENANT), client_salt=self._foreign(salt or ""))
        return self._naming(pool, minted, adapter or "")

    def _foreign(self, salt: str) -> bytes:
        return self._keyring.client_salt_digest(self._keyring.key_id(DEFAULT_TENANT), salt)

    def _salted(self, request: Request, pool: ModelPool) -> SaltedNaming:
        key = (pool.model, pool.generation, request.adapter, request.namespace, request.client_salt)
        salted = self._namings.get(key)
        if salted is not None:
            return salted
        if len(request.client_salt.encode()) > CLIENT_SALT_BYTES_MAX:
            raise BadRequest(f"'cache_salt' is longer than {CLIENT_SALT_BYTES_MAX} bytes.", param="cache_salt")
        key_id = self._keyring.key_id(request.namespace)
        salt = Salt(key_id, client_salt=self._keyring.client_salt_digest(key_id, request.client_salt))
        naming = self._naming(pool, salt, request.adapter)
        assert naming is not None  # noqa: S101  the current epoch's key is always there
        salted = SaltedNaming(naming, orjson.dumps(self._keyring.mint_salt(salt)))
        self._namings[key] = salted
        if len(self._namings) > NAMINGS_MAX:
            # The oldest: if it matters it is soon back.
            del self._namings[next(iter(self._namings))]
        return salted

    def _naming(self, pool: ModelPool, salt: Salt, adapter: str) -> Naming | None:
        scope = IdentityScope(
            model=pool.model,
            key_id=KeyId(salt.key_id.tenant, salt.key_id.epoch),
            block_size_tokens=pool.block_size_tokens,
            tokenizer=pool.renderer.fingerprint if pool.renderer else "",
            adapter=adapter,
            client_salt=salt.client_salt,
        )
        try:
            return Naming.of(scope, self._keyring)
        except KeyError:
            return None

    # Prompts

    def name(self, request: Request, pool: ModelPool) -> NamedPrompt | Awaitable[NamedPrompt]:
        """The request's prompt, named. Raises PromptError, at once or when awaited."""
        kind, renderer = request.kind, pool.renderer
        if kind is not _CHAT and kind is not _COMPLETION:
            return self._name_foreign(request, pool)
        naming, request.salt_json = self._salted(request, pool)
        if request.reshaped:
            return _unread(request)
        if kind is _CHAT and renderer is not None:
            return self._finish(self._namer.begin(renderer, naming, renderer.chat(request.values)))
        prompt = None if kind is _CHAT else request.values.get("prompt")
        if kind is not _CHAT and not isinstance(prompt, str):
            return self._name_listed(request, pool, naming, prompt)
        if renderer is None:
            return self._name_remotely(request, pool, naming)
        return self._finish(self._namer.begin(renderer, naming, renderer.text(str(prompt))))

    def _name_foreign(self, request: Request, pool: ModelPool) -> NamedPrompt | Awaitable[NamedPrompt]:
        """A prompt in another form than OpenAI's two, as the one of those that engines make of it. How they do that
        differs between their versions, so it never counts as known to its end."""
        prompt = prompt_of(request) if request.body is not None and _keeps_apart(pool, request.path) else None
        if prompt is None or request.reshaped:
            return _unread(request)
        request.values = prompt
        naming, request.salt_json = self._salted(request, pool)
        renderer, text = pool.renderer, prompt.get("prompt")
        try:
            if renderer is None:
                return self._name_remotely(request, pool, naming)
            if "messages" in prompt:
                return self._finish(self._namer.begin(renderer, naming, _begun(renderer.chat(prompt))))
            if isinstance(text, str):
                return self._finish(self._namer.begin(renderer, naming, _begun(renderer.text(text))))
            return self._name_listed(request, pool, naming, text)
        except PromptError:
            # Whether it is one is for the engine to say.
            return _unread(request)

    def _finish(self, work: NamedPrompt | Work) -> NamedPrompt | Awaitable[NamedPrompt]:
        """Name what is left: at once, or in a thread where that would keep the loop from its other requests."""
        if isinstance(work, NamedPrompt):
            return work
        if work.missing_characters > self._long_prompt_characters:
            return self._compute_in_thread(work)
        named = work.compute()
        self._namer.insert(work)
        return named

    async def _compute_in_thread(self, work: Work) -> NamedPrompt:
        named = await asyncio.get_running_loop().run_in_executor(None, work.compute)
        self._namer.insert(work)
        return named

    def _name_listed(
        self, request: Request, pool: ModelPool, naming: Naming, prompt: Any
    ) -> NamedPrompt | Awaitable[NamedPrompt]:
        """Token ids, or several prompts: those are routed by the first and weighed by all."""
        if not isinstance(prompt, list) or not prompt:
            raise PromptError("'prompt' must be a string, a list of strings, token ids, or lists of token ids")
        if all(isinstance(token, int) for token in prompt):
            return self._finish(self._look_up_tokens(naming, prompt))
        request.prompts_count = len(prompt)
        lists = [item for item in prompt if isinstance(item, list)]
        if len(lists) == len(prompt):
            first = self._look_up_tokens(naming, lists[0]).compute()
            return first._replace(token_count=sum(map(len, lists)))
        if not all(isinstance(item, str) for item in prompt):
            raise PromptError("'prompt' mixes strings and token ids")
        estimate = sum(map(len, prompt)) // CHARACTERS_PER_TOKEN
        if pool.renderer is None:
            return NamedPrompt(estimate, EMPTY_CHAIN, complete=False)
        first = self._namer.name(pool.renderer, naming, pool.renderer.text(prompt[0]))
        return first._replace(token_count=max(estimate, first.token_count))

    def _look_up_tokens(self, naming: Naming, token_ids: list[Any]) -> Work:
        try:
            return self._namer.look_up_tokens(naming, token_ids)
        except (OverflowError, TypeError):
            raise PromptError("token ids must be integers from 0 to 2**32-1") from None

    async def _name_remotely(self, request: Request, pool: ModelPool, naming: Naming) -> NamedPrompt:
        """By a worker's own rendering; where that cannot be had the prompt stays unnamed and is routed by load."""
        question = request.question()
        # What stands for an image among the tokens is the same for all of them.
        if question is None or self.remote is None or has_media(question.get("messages")):
            return _unread(request)
        token_ids = await self.remote.tokens(pool, question, naming.root)
        if token_ids is None:
            return _unread(request)
        named = self._namer.name_tokens(naming, token_ids)
        return named._replace(complete=False) if request.foreign else named

    def told_tokens(self, request: Request, pool: ModelPool, question: Mapping[str, Any]) -> "array[int] | None":
        """What an engine has told of a prompt that cannot be tokenized here, if it is still known."""
        return self.remote.known(pool, question, self._salted(request, pool).naming.root) if self.remote else None


def _unread(request: Request) -> NamedPrompt:
    return NamedPrompt(weight_tokens(request), EMPTY_CHAIN, complete=False)


def _begun(rendered: Rendered) -> Rendered:
    return rendered._replace(complete=False)


def _keeps_apart(pool: ModelPool, path: str) -> bool:
    """Whether a route's prompts are cached under the names that chats have: with the salt, where there are salts."""
    return all(not worker.traits.salts or path in worker.traits.salted_paths for worker in pool.workers)
