"""From documents to postings: which terms each document holds, turned around into which documents hold each term."""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise, zip_longest

import numpy as np

from webshop_env.search.analyzer import analyze

# Dimensions: N documents, T terms, P postings (pairs of term and document).

CHUNK = 1 << 14
"""Documents that are held in Python objects, or turned around, at a time."""


@dataclass(frozen=True, slots=True)
class Documents:
    """What one pass over the texts leaves, in the order in which they came."""

    asins: list[str]
    """N."""
    terms: list[bytes]
    """T, UTF-8, in order of first appearance."""
    lengths: np.ndarray
    """int64 [N], tokens of each document."""
    sizes: np.ndarray
    """int64 [N], different terms of each document."""
    doc_terms: np.ndarray
    """int32 [P], the terms of each document, document after document."""
    doc_tfs: np.ndarray
    """int [P], how often each comes in its document."""
    content_hash: str
    """SHA-256 of asins and texts; empty where it was not asked for."""


def read_documents(docs: Iterable[str], asins: Iterable[str], *, with_hash: bool) -> Documents:
    """Analyze texts one after another; none is kept.

    Raises:
        ValueError: There are not as many asins as texts.
    """
    digest = hashlib.sha256()
    taken: list[str] = []
    term_ids: dict[str, int] = {}
    chunks: list[tuple[np.ndarray, ...]] = []
    term_list: list[int] = []
    tf_list: list[int] = []
    sizes: list[int] = []
    lengths: list[int] = []
    for doc, asin in document_pairs(docs, asins):
        taken.append(asin)
        if with_hash:
            for text in (asin, doc):
                encoded = text.encode("utf-8", "surrogatepass")
                digest.update(len(encoded).to_bytes(8, "little") + encoded)
        tokens = analyze(doc)
        counts = Counter(tokens)
        term_list += [term_ids.setdefault(term, len(term_ids)) for term in counts]
        tf_list += counts.values()
        sizes.append(len(counts))
        lengths.append(len(tokens))
        if len(sizes) == CHUNK:
            chunks.append(_packed(term_list, tf_list, sizes, lengths))
            term_list, tf_list, sizes, lengths = [], [], [], []
    chunks.append(_packed(term_list, tf_list, sizes, lengths))
    doc_terms, doc_tfs, all_sizes, all_lengths = (_joined(column) for column in _columns(chunks))
    return Documents(
        asins=taken,
        terms=[term.encode("utf-8", "surrogatepass") for term in term_ids],
        lengths=all_lengths,
        sizes=all_sizes,
        doc_terms=doc_terms,
        doc_tfs=doc_tfs,
        content_hash=digest.hexdigest() if with_hash else "",
    )


def document_pairs(docs: Iterable[str], asins: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Each text with its asin, the text taken first; ValueError if there are not as many of both."""
    nothing = object()
    num_docs = num_asins = 0
    for doc, asin in zip_longest(docs, asins, fillvalue=nothing):
        num_docs += doc is not nothing
        num_asins += asin is not nothing
        if num_docs == num_asins:
            yield doc, asin  # type: ignore[misc]  # neither is the filler
    if num_docs != num_asins:
        raise ValueError(f"as many asins as documents are needed, got {num_asins} and {num_docs}")


def _packed(term_list: list[int], tf_list: list[int], sizes: list[int], lengths: list[int]) -> tuple[np.ndarray, ...]:
    tfs = np.array(tf_list, dtype=np.int64)
    tfs = tfs.astype(np.min_scalar_type(int(tfs.max(initial=0))))
    return np.array(term_list, np.int32), tfs, np.array(sizes, np.int64), np.array(lengths, np.int64)


def _columns(chunks: list[tuple[np.ndarray, ...]]) -> Iterator[list[np.ndarray]]:
    """The chunks column by column; each is forgotten before the next."""
    columns = [list(column) for column in zip(*chunks, strict=True)]
    chunks.clear()
    while columns:
        yield columns.pop(0)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    joined = np.concatenate(parts)
    parts.clear()
    return joined


def asin_order(asins: list[str]) -> np.ndarray:
    """int64 [N], the documents in ascending order of asin.

    Raises:
        ValueError: An asin comes twice.
    """
    order = sorted(range(len(asins)), key=asins.__getitem__)
    for left, right in pairwise(order):
        if asins[left] == asins[right]:
            raise ValueError(f"asin {asins[left]} comes twice; every product needs its own")
    return np.array(order, dtype=np.int64)


def hash_order(terms: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """The terms by their CRC-32, by which they are found again.

    Returns:
        int64 [T], places in `terms`, and uint32 [T], their checksums, ascending.
    """
    checksums = np.fromiter(map(zlib.crc32, terms), dtype=np.uint32, count=len(terms))
    order = np.argsort(checksums, kind="stable")
    return order, checksums[order]


def invert(documents: Documents, *, order: np.ndarray, term_order: np.ndarray, length_bytes: np.ndarray) -> Postings:
    """Turn documents around.

    Args:
        documents: What `read_documents` returned.
        order: int64 [N], document numbers to come -> places in `documents`.
        term_order: int64 [T], term numbers to come -> places in `documents.terms`.
        length_bytes: uint8 [N], lengths of the documents as they came.
    """
    num_terms, num_postings = len(documents.terms), len(documents.doc_terms)
    new_ids = np.empty(num_terms, dtype=np.int32)
    new_ids[term_order] = np.arange(num_terms, dtype=np.int32)
    starts = np.zeros(num_terms + 1, dtype=np.int64)
    np.cumsum(np.bincount(documents.doc_terms, minlength=num_terms)[term_order], out=starts[1:])
    begins = np.cumsum(documents.sizes) - documents.sizes
    kinds = _kinds(documents, length_bytes)
    docs = np.empty(num_postings, dtype=np.int32)
    codes = np.empty(num_postings, dtype=np.min_scalar_type(len(kinds)))
    filled = starts[:-1].copy()
    for first in range(0, len(order), CHUNK):
        places = order[first : first + CHUNK]
        sizes = documents.sizes[places]
        ends = np.cumsum(sizes)
        within = np.arange(ends[-1]) - np.repeat(ends - sizes, sizes)
        sources = np.repeat(begins[places], sizes) + within
        terms = new_ids[documents.doc_terms[sources]]
        pairs = _pair(documents.doc_tfs[sources], np.repeat(length_bytes[places], sizes))
        by_term = np.argsort(terms, kind="stable")  # keeps documents ascending
        present, counts = np.unique(terms, return_counts=True)
        targets = np.repeat(filled[present] - (np.cumsum(counts) - counts), counts) + np.arange(len(terms))
        filled[present] += counts
        numbers = np.repeat(np.arange(first, first + len(places), dtype=np.int32), sizes)
        docs[targets] = numbers[by_term]
        codes[targets] = np.searchsorted(kinds, pairs)[by_term]
    return Postings(starts=starts, docs=docs, codes=codes, tfs=kinds >> 8, length_bytes=(kinds & 255).astype(np.uint8))


@dataclass(frozen=True, slots=True)
class Postings:
    """Which documents hold each term. A posting's pair of frequency and document length is kept as a number of it."""

    starts: np.ndarray
    """int64 [T + 1]; term i has the postings starts[i]:starts[i + 1]."""
    docs: np.ndarray
    """int32 [P], ascending within a term."""
    codes: np.ndarray
    """uint [P], places in the two arrays below."""
    tfs: np.ndarray
    """int64 [any], how often a term comes in a document."""
    length_bytes: np.ndarray
    """uint8 [any], how long that document is."""


def _pair(tfs: np.ndarray, length_bytes: np.ndarray) -> np.ndarray:
    return tfs.astype(np.int64) << 8 | length_bytes


def _kinds(documents: Documents, length_bytes: np.ndarray) -> np.ndarray:
    """int64 [any], the different pairs of frequency and length, ascending."""
    found = [np.empty(0, dtype=np.int64)]
    ends = np.concatenate([[0], np.cumsum(documents.sizes)])
    for first in range(0, len(documents.sizes), CHUNK):
        last = min(first + CHUNK, len(documents.sizes))
        tfs = documents.doc_tfs[ends[first] : ends[last]]
        found.append(np.unique(_pair(tfs, np.repeat(length_bytes[first:last], documents.sizes[first:last]))))
    return np.unique(np.concatenate(found))
