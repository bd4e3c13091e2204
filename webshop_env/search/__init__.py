"""Search over a catalogue: the embedded BM25 engine and the protocol that other engines follow."""

from __future__ import annotations

from webshop_env.search.analyzer import analyze
from webshop_env.search.base import IndexMismatchError, QueryTooLongError, SearchEngine, require_catalogue
from webshop_env.search.bm25 import BM25Index, BM25Search

__all__ = [
    "BM25Index",
    "BM25Search",
    "IndexMismatchError",
    "QueryTooLongError",
    "SearchEngine",
    "analyze",
    "require_catalogue",
]
