"""What every search engine of the shop offers, and the mistakes that callers can make with one."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from webshop_env.errors import ShopGymError


class QueryTooLongError(ShopGymError):
    """A query has more distinct terms than the engine takes (1,024, the limit of Lucene's boolean queries)."""


class IndexMismatchError(ShopGymError):
    """An index file is damaged, or was built from another catalogue than the one it is to serve."""


@runtime_checkable
class SearchEngine(Protocol):
    """Ranks the products of one catalogue."""

    @property
    def catalogue_hash(self) -> str:
        """Which catalogue the index was built from; see `require_catalogue`."""
        ...

    def search(self, query: str, k: int = 50) -> tuple[str, ...]:
        """Return at most k asins, best first; none for a query without search terms.

        Raises:
            QueryTooLongError: if the engine does not take so many distinct terms.
        """
        ...


def require_catalogue(index_hash: str, catalogue_hash: str, what: str) -> None:
    """Refuse an index of another catalogue: its hits might not exist here, and its ranks would be wrong.

    Raises:
        IndexMismatchError: if the two hashes differ; `what` names the index in the message.
    """
    if index_hash != catalogue_hash:
        raise IndexMismatchError(
            f"{what}: built from catalogue {index_hash[:16] or '(none)'}, "
            f"but the shop's is {catalogue_hash[:16] or '(none)'}; build the index again"
        )
