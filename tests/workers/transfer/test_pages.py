"""An engine's memory by whole blocks."""

import pytest
import torch

from workers.transfer.pages import Pages, Stretch, stretches_of


def test_blocks_as_stretches() -> None:
    assert stretches_of([4, 5, 6, 2, 9, 8]) == [Stretch(4, 7), Stretch(2, 3), Stretch(9, 10), Stretch(8, 9)]
    assert stretches_of([]) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("blocks", [[3, 4, 5], [5, 1, 2]])
def test_what_is_written_is_read_and_sent(blocks: list[int], dtype: torch.dtype) -> None:
    keys, values = (torch.randn(2, 7, 4, 3, 8).to(dtype) for _ in range(2))
    source, target = Pages(keys, values), Pages(torch.zeros_like(keys), torch.zeros_like(values))
    kv = source.read(1, stretches_of(blocks))
    expected = [pool[1, blocks].flatten(0, 1) for pool in (keys, values)]
    assert all(torch.equal(*pair) for pair in zip(kv, expected, strict=True))
    sent = b"".join(source.payload(1, stretches_of(blocks)))
    assert sent == b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in expected)
    target.write(1, stretches_of(blocks), kv)
    assert torch.equal(target.keys[1, blocks], keys[1, blocks])
    assert torch.equal(target.values[1, blocks], values[1, blocks])
    untouched = [block for block in range(7) if block not in blocks]
    assert not target.keys[1, untouched].any()
    assert not target.keys[0].any()
