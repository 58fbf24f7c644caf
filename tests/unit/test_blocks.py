"""KV blocks: counted, shared by equal prefixes only, evicted least recently freed first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from truegraft.core.blocks import ROOT, BlockKey, BlockPool

SIZE = 4


def publish(pool: BlockPool, tokens: list[int], adapter: str | None = None) -> list[int]:
    """Allocate and register the full blocks of `tokens`; still held."""
    blocks = pool.allocate(len(tokens) // SIZE)
    assert blocks is not None
    parent = ROOT
    for index, block in enumerate(blocks):
        span = tuple(tokens[index * SIZE : (index + 1) * SIZE])
        parent = pool.register(block, BlockKey(parent, span, adapter, None))
    return blocks


def found(pool: BlockPool, tokens: list[int], adapter: str | None = None) -> list[int]:
    return [hit.block for hit in pool.match(tokens, adapter, None)]


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(3, SIZE)
    assert pool.allocate(4) is None
    assert pool.num_free == 3
    blocks = pool.allocate(3)
    assert blocks is not None and sorted(blocks) == [0, 1, 2]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []
    pool.check_integrity(blocks)


def test_a_match_leaves_one_token_to_compute() -> None:
    pool = BlockPool(4, SIZE)
    blocks = publish(pool, list(range(8)))
    assert found(pool, list(range(8))) == blocks[:1]
    assert found(pool, list(range(9))) == blocks
    assert found(pool, list(range(4))) == []
    assert found(pool, []) == []


def test_a_match_stops_at_the_first_difference() -> None:
    pool = BlockPool(4, SIZE)
    blocks = publish(pool, list(range(12)))
    assert found(pool, [*range(4), 99, *range(5, 13)]) == blocks[:1]
    assert found(pool, [99, *range(1, 13)]) == []


def test_equal_tokens_after_another_prefix_are_another_content() -> None:
    pool = BlockPool(4, SIZE)
    publish(pool, [1, 1, 1, 1, 5, 5, 5, 5])
    assert found(pool, [5, 5, 5, 5, 0]) == []
    assert found(pool, [2, 2, 2, 2, 5, 5, 5, 5, 0]) == []


def test_adapters_and_salts_share_nothing() -> None:
    pool = BlockPool(8, SIZE)
    tokens = list(range(9))
    base, grafted = publish(pool, tokens), publish(pool, tokens, "a")
    assert found(pool, tokens) == base
    assert found(pool, tokens, "a") == grafted
    assert found(pool, tokens, "b") == []
    assert pool.match(tokens, None, "salt") == []


def test_the_key_tells_none_from_a_name() -> None:
    pool = BlockPool(2, SIZE)
    publish(pool, list(range(4)), "None")
    assert found(pool, list(range(5))) == []


def test_registering_known_content_keeps_the_first_copy() -> None:
    pool = BlockPool(4, SIZE)
    first, second = publish(pool, [1] * 4), publish(pool, [1] * 4)
    assert found(pool, [1] * 5) == first
    pool.release(second)
    assert found(pool, [1] * 5) == first
    pool.check_integrity(first)


def test_a_freed_prefix_can_be_taken_back_until_it_is_evicted() -> None:
    pool = BlockPool(2, SIZE)
    tokens = list(range(9))
    blocks = publish(pool, tokens)
    pool.release(blocks)
    assert pool.num_free == 2
    assert pool.take(pool.match(tokens, None, None)) == blocks
    assert pool.num_free == 0
    pool.release(blocks)
    taken = pool.allocate(2)
    assert taken is not None and found(pool, tokens) == []
    assert pool.num_evictions == 2
    pool.check_integrity(taken)


def test_blocks_without_content_go_first_then_a_prefix_tail_before_its_head() -> None:
    pool = BlockPool(4, SIZE)
    tokens = list(range(9))
    blocks = publish(pool, tokens)
    pool.release(blocks)
    plain = pool.allocate(2)
    assert plain is not None and not set(plain) & set(blocks)
    assert pool.allocate(1) == [blocks[1]]
    assert found(pool, tokens) == blocks[:1]


def test_eviction_takes_the_prefix_that_was_freed_longest_ago() -> None:
    pool = BlockPool(2, SIZE)
    old, new = publish(pool, [1] * 4), publish(pool, [2] * 4)
    pool.release(old)
    pool.release(new)
    pool.release(pool.take(pool.match([1] * 5, None, None)))
    assert pool.allocate(1) == new
    assert found(pool, [1] * 5) == old


def test_children_of_an_evicted_parent_are_not_found_under_its_successor() -> None:
    pool = BlockPool(3, SIZE)
    blocks = publish(pool, [*[1] * 4, *[2] * 4])
    pool.discard(blocks[:1])
    again = pool.allocate(1)
    assert again is not None
    pool.register(again[0], BlockKey(ROOT, (1,) * 4, None, None))
    assert found(pool, [*[1] * 4, *[2] * 4, 0]) == again


def test_discarded_and_cleared_content_is_not_found() -> None:
    pool = BlockPool(4, SIZE)
    blocks = publish(pool, list(range(8)))
    pool.discard(blocks[1:])
    assert found(pool, list(range(9))) == blocks[:1]
    assert pool.num_evictions == 0
    pool.clear_cache()
    assert found(pool, list(range(9))) == [] and pool.num_cached == 0
    pool.check_integrity(blocks)


def test_a_block_released_too_often_is_our_own_mistake() -> None:
    pool = BlockPool(1, SIZE)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released too often"):
        pool.release(blocks)


def test_integrity_sees_a_lost_block() -> None:
    pool = BlockPool(2, SIZE)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="references differ"):
        pool.check_integrity([])


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40), st.sampled_from("ab")), max_size=60)
)
def test_a_match_always_holds_the_tokens_and_the_adapter_it_is_asked_for(
    steps: list[tuple[int, int, str]],
) -> None:
    """Contents are tracked beside the pool: a hit must never show another block's content."""
    pool = BlockPool(6, SIZE)
    content: dict[int, tuple[tuple[int, ...], str]] = {}
    held: list[list[int]] = []
    for kind, seed, adapter in steps:
        tokens = [seed % 3] * SIZE + [seed % 2] * SIZE + [seed % 5] * (seed % SIZE + 1)
        if kind == 2 and held:
            pool.release(held.pop(seed % len(held)))
        else:
            hits = pool.match(tokens, adapter, None)
            for index, hit in enumerate(hits):
                assert content[hit.block] == (tuple(tokens[: (index + 1) * SIZE]), adapter)
            blocks = pool.take(hits)
            new = pool.allocate(len(tokens) // SIZE - len(hits))
            if new is None:
                pool.release(blocks)
            else:
                blocks += new
                parent = hits[-1].node if hits else ROOT
                for index in range(len(hits), len(blocks)):
                    content[blocks[index]] = (tuple(tokens[: (index + 1) * SIZE]), adapter)
                    span = tuple(tokens[index * SIZE : (index + 1) * SIZE])
                    parent = pool.register(blocks[index], BlockKey(parent, span, adapter, None))
                held.append(blocks)
        pool.check_integrity([block for blocks in held for block in blocks])
