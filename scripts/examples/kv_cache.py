"""A KV cache that is larger than memory: pages of it go to a drive and come back, with asyncio.

An attention cache is one bf16 tensor: layers, keys and values, tokens, heads, size of a head. A
page is some tokens of it through all layers, so its bytes lie in strides. Each page is one tensor
of a swap store, which has no commits, and whose space is free again however the program ends.

    python scripts/examples/kv_cache.py [DIRECTORY]
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass

import torch

import deepnvme

LAYERS, HEADS, HEAD_SIZE = 8, 8, 64
TOKENS, PAGE_TOKENS = 512, 32
CONVERSATIONS = 8


@dataclass(frozen=True)
class Page:
    """`PAGE_TOKENS` tokens of one conversation."""

    conversation: int
    number: int

    @property
    def name(self) -> str:
        """What the store calls it."""
        return f"{self.conversation}/{self.number}"

    @property
    def tokens(self) -> slice:
        """Its tokens in the cache of the conversation."""
        return slice(self.number * PAGE_TOKENS, (self.number + 1) * PAGE_TOKENS)


class PagedCache:
    """The caches of several conversations: pages are in memory, or in a store."""

    def __init__(self, store: deepnvme.TensorStore) -> None:
        self._store = store
        self._caches: dict[int, torch.Tensor] = {}

    def cache_of(self, conversation: int) -> torch.Tensor:
        """Return the cache that the model works on."""
        shape = (LAYERS, 2, TOKENS, HEADS, HEAD_SIZE)
        return self._caches.setdefault(conversation, torch.zeros(shape, dtype=torch.bfloat16))

    async def offload(self, pages: Iterable[Page]) -> None:
        """Write pages to the store. Puts that are begun together are written together."""
        await asyncio.gather(
            *(
                # A page lies in strides: `copy` says that it may be copied to be written.
                self._store.put_async(page.name, self._view_of(page), copy=True)
                for page in pages
            )
        )

    async def restore(self, pages: Iterable[Page]) -> None:
        """Read pages back into the caches, each as soon as it is there."""

        async def restore_one(page: Page) -> None:
            self._view_of(page).copy_(await self._store.get_async(page.name))

        await asyncio.gather(*map(restore_one, pages))

    async def layer_of(self, page: Page, layer: int) -> torch.Tensor:
        """Return the keys and values of one layer of a page in the store. Reads those alone."""
        part: torch.Tensor = await self._store.get_slice(page.name).get_async(layer)
        return part

    def forget(self, conversation: int) -> None:
        """Let go of the memory of a conversation."""
        del self._caches[conversation]

    def _view_of(self, page: Page) -> torch.Tensor:
        return self.cache_of(page.conversation)[:, :, page.tokens]


async def converse(cache: PagedCache, conversation: int) -> None:
    """Fill a cache, offload it, free its memory, and bring it back."""
    pages = [Page(conversation, number) for number in range(TOKENS // PAGE_TOKENS)]
    filled = cache.cache_of(conversation).copy_(torch.randn(LAYERS, 2, TOKENS, HEADS, HEAD_SIZE))
    expected = filled.clone()
    await cache.offload(pages)
    cache.forget(conversation)

    layer = await cache.layer_of(pages[3], layer=5)
    assert torch.equal(layer, expected[5, :, pages[3].tokens])

    await cache.restore(pages)
    assert torch.equal(cache.cache_of(conversation), expected)
    cache.forget(conversation)


async def main(directory: str) -> None:
    """Hold several conversations at once."""
    page_bytes = LAYERS * 2 * PAGE_TOKENS * HEADS * HEAD_SIZE * 2
    capacity = CONVERSATIONS * (TOKENS // PAGE_TOKENS) * page_bytes
    # Twice the pages: a page that is replaced is written before its old place is free.
    async with deepnvme.TensorStore.swap(directory, 2 * capacity) as store:
        cache = PagedCache(store)
        await asyncio.gather(*(converse(cache, number) for number in range(CONVERSATIONS)))
    print(
        f"{CONVERSATIONS} conversations, {capacity >> 20} MiB of pages: all came back as they were"
    )


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("directory", nargs="?", help="on the drive; without it, a temporary one")
    with tempfile.TemporaryDirectory() as temporary:
        asyncio.run(main(arguments.parse_args().directory or temporary))
