"""KV block pool with reference counts, and the prefix cache over it.

A cache key is a typed tuple (parent node, tokens, adapter fingerprint, salt). The parent is a node
number that is never used twice, so equal keys mean equal prefixes: nothing is hashed together,
nothing can collide. Knows nothing about requests or devices.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

ROOT = 0


class BlockKey(NamedTuple):
    """Identity of a full block's content: all before it (parent), its tokens, who computed it."""

    parent: int
    tokens: tuple[int, ...]
    adapter: str | None
    salt: str | None


class CachedBlock(NamedTuple):
    """Where a key's content lies, and the node that its children name as parent."""

    block: int
    node: int


class BlockPool:
    """`num_blocks` KV blocks of `block_size` tokens.

    A block is in use (references > 0), or free. A free block that holds a cached prefix can be
    taken back by `match` until `allocate` evicts it, least recently freed first.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.num_evictions = 0
        self._refs = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._cached: dict[BlockKey, CachedBlock] = {}
        self._key_of: dict[int, BlockKey] = {}
        self._next_node = ROOT + 1

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could give now."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks whose content can be found by `match`."""
        return len(self._cached)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or None if there are not as many."""
        if count > len(self._free):
            return None
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._forget(block)
            self._refs[block] = 1
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each. A prefix's tail is evicted before its head."""
        for block in reversed(blocks):
            assert self._refs[block] > 0, f"block {block} released too often"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free[block] = None
                self._free.move_to_end(block, last=block in self._key_of)

    def match(
        self, tokens: Sequence[int], adapter: str | None, salt: str | None
    ) -> list[CachedBlock]:
        """The longest cached prefix, as full blocks, leaving at least one token to compute."""
        found: list[CachedBlock] = []
        for index in range((len(tokens) - 1) // self.block_size):
            hit = self._cached.get(self._key(index, tokens, found, adapter, salt))
            if hit is None:
                break
            found.append(hit)
        return found

    def _key(
        self,
        index: int,
        tokens: Sequence[int],
        before: Sequence[CachedBlock],
        adapter: str | None,
        salt: str | None,
    ) -> BlockKey:
        span = tuple(tokens[index * self.block_size : (index + 1) * self.block_size])
        return BlockKey(before[-1].node if before else ROOT, span, adapter, salt)

    def take(self, hits: Sequence[CachedBlock]) -> list[int]:
        """Add one reference to each block of a match."""
        for block, _ in hits:
            self._free.pop(block, None)
            self._refs[block] += 1
        return [block for block, _ in hits]

    def register(self, block: int, key: BlockKey) -> int:
        """Publish a full block under `key`; return the node that names this content.

        If another block holds the same content already, that one stays the cached copy.
        """
        known = self._cached.get(key)
        if known is not None:
            return known.node
        entry = CachedBlock(block, self._next_node)
        self._next_node += 1
        self._cached[key] = entry
        self._key_of[block] = key
        return entry.node

    def discard(self, blocks: Sequence[int]) -> None:
        """Forget what these blocks hold: it must not be found by `match` again."""
        for block in blocks:
            self._forget(block, evicted=False)

    def clear_cache(self) -> None:
        """Forget every cached prefix."""
        self.discard(list(self._key_of))

    def _forget(self, block: int, evicted: bool = True) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._cached[key]
            self.num_evictions += evicted

    def check_integrity(self, held: Sequence[int] = ()) -> None:
        """Assert the pool's own invariants, and that `held` is exactly what is referenced."""
        counts = [0] * self.num_blocks
        for block in held:
            counts[block] += 1
        assert counts == self._refs, "references differ from what requests hold"
        assert all((ref == 0) == (b in self._free) for b, ref in enumerate(self._refs))
        assert len(self._cached) == len(self._key_of)
        assert all(self._cached[key].block == b for b, key in self._key_of.items())
