from gateway.edge.http1 import RequestHead
from gateway.edge.server import Inbound
from gateway.steering.pins import contains
from gateway.steering.samples import Prompt, hottest
from gateway.tenants import Tenant

HASH_BYTES = 16


def chain(text: str) -> bytes:
    """One block a letter, each named after all before it."""
    return b"".join(text[:end].encode().rjust(HASH_BYTES, b".") for end in range(1, len(text) + 1))


def prompts(*texts: str) -> list[Prompt]:
    head = RequestHead(b"POST", b"/v1/chat/completions", [], 1, True, False, False, {})
    inbound = Inbound(head, "/v1/chat/completions", b"{}", "")
    return [Prompt(inbound, Tenant("default"), "m", 0, chain(text), 16) for text in texts]


def named(texts: list[str], count: int = 10) -> list[tuple[str, int, int]]:
    found = hottest(prompts(*texts), count)
    return [(bytes.fromhex(prefix.name).decode().lstrip("."), prefix.blocks, prefix.prompts) for prefix in found]


def test_what_prompts_share_is_hot_and_what_only_one_has_is_not() -> None:
    assert named(["systemA", "systemB", "systemCC", "other"]) == [("system", 6, 3)]


def test_of_nested_prefixes_each_counts_once() -> None:
    """Six blocks in four prompts come before eight in two; what the deeper one begins with is not listed again."""
    assert named(["systemXXa", "systemXXb", "systemc", "systemd"]) == [("system", 6, 4), ("systemXX", 8, 2)]
    assert named(["abcdefgh", "abcdefgh", "ab"]) == [("abcdefgh", 8, 2)]


def test_the_shortest_prompt_stands_for_a_prefix_and_the_list_is_bounded() -> None:
    (found,) = hottest(prompts("systemAAAA", "systemB", "zz", "zz"), 1)
    assert (found.name, found.chain, found.tokens) == (chain("system")[-HASH_BYTES:].hex(), chain("system"), 96)
    assert found.example.chain == chain("systemB")


def test_a_block_is_looked_for_where_blocks_begin() -> None:
    blocks = bytes(range(32))
    assert contains(blocks, blocks[16:])
    assert not contains(blocks, blocks[8:24])
    assert contains(bytes(15) + bytes([1]) + bytes(16), bytes(16))
